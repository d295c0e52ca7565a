"""Clients that measure a running server."""
