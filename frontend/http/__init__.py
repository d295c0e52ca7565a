"""The HTTP server below its routes: connections, TLS, CORS, access, limits, life cycle."""
