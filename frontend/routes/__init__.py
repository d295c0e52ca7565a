"""HTTP routes: each decodes a request, calls its endpoint and writes the response."""
