"""Routing and mixture-of-experts layers: torch references."""
