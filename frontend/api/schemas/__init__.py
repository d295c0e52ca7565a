"""Fields and rules that several request schemas share."""
