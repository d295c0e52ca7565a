"""Layers that models are built of, sharded over the tensor-parallel ranks where that helps."""
