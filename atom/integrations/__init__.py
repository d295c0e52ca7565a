"""ATOM inside other systems' processes."""
