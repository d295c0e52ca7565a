"""Slower KV tiers, such as host memory and disk: which blocks they hold, and the copies."""
