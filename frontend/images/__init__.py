"""Images of conversations."""
