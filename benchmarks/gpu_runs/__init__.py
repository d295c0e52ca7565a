"""Rows, runs and results of `benchmarks.gpu`."""
