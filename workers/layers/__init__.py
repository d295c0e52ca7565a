"""Building blocks of models, each spread over the tensor-parallel ranks where that helps."""
