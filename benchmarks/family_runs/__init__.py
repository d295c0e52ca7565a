"""Configurations, runs and floors of `benchmarks.families`."""
