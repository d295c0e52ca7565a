"""Stands in for AITER's kernels, which a CPU does not run, so that the backend `aiter` can be chosen."""
