"""Policy: which tokens of which requests run next, and which KV blocks they own.

Knows no text, no tensors and no model; nothing here imports torch.
"""
