"""What the benchmarks of collectives and of steps run in each GPU's process."""
