"""The client of the engine cores: links, routing, admission, streams, replay."""
