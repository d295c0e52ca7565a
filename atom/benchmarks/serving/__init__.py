"""The parts of the serving benchmark: `python -m atom.benchmarks.benchmark_serving` puts them together."""
