"""What kernels share: which GPU runs them, programmatic dependent launch, tiles, pipelines."""
