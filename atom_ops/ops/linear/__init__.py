"""Linear layers and what is fused with them: torch references."""
