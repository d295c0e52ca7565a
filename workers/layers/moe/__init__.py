"""Mixture-of-experts layers and how their experts are laid out."""
