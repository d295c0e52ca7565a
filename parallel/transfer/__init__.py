"""Reads of another process's memory through a transfer library."""
