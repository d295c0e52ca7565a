"""One rank of the engine: weights, KV tensors, sampling. Modules here may import torch."""
