"""What measures the code itself: kernels, steps, collectives, offline engines, simulation."""
