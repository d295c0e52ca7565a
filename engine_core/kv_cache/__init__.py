"""The KV cache: blocks, block tables, the prefix cache, saved recurrent states, and published events."""
