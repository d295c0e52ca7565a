"""Analyses the profiler traces of workers: time by step, layer and module."""
