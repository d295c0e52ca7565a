"""One file for each family of ops."""
