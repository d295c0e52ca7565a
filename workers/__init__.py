"""One rank of the engine: weights, KV tensors, sampling. Everything here may import torch."""
