"""Shapes, inputs, floors and clock of `benchmarks.kernels`."""
