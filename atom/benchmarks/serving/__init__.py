"""The modules of `python -m atom.benchmarks.benchmark_serving`."""
