"""The HTTP API, a folder an endpoint: schema, endpoint, renderer."""
