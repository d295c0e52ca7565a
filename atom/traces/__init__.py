"""Reads the traces that workers write: which step, layer and module the time went to."""
