"""Names under which others start the server."""
