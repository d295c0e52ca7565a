"""Stands in for AITER's kernels, which a CPU does not run: SGLang lets GPT-OSS run with backends of some names alone,
of which ATOM's second one is `aiter`."""
