"""The sampler and the state of logits processors."""
