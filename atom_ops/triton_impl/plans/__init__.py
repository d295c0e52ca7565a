"""GEMM plans: measured tables, the tuner, and the file that keeps its results."""
