"""Quantization schemes: one file for each format, named in `config.FORMATS`."""
