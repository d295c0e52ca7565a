"""The HTTP server: owns text and the record of every request in flight. No torch, no model."""
