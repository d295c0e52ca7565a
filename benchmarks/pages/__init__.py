"""Writes docs/measurements/benchmarks.md and its picture from recorded results."""
