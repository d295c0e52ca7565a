"""Speculative decoding: a method is one file here with a `Proposer`."""
