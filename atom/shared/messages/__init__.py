"""Typed messages of every wire. Fields are only ever appended; nothing here imports torch."""
