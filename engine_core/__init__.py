"""Scheduling: which tokens of which requests run in the next step, and which KV blocks they use.

Nothing here handles text, tensors or models, or imports torch.
"""
