"""Processes, sockets, environment variables, errors and logs: small tools without state."""
