"""Sessions of coding agents against a running server: `python -m atom.benchmarks.agentic --help`."""
