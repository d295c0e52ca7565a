"""Writes docs/benchmarks.md and its picture from recorded results."""
