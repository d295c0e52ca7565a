"""Qwen3.5 (dense) in a directory of its text model alone."""

from workers.models.qwen3_5 import Qwen3_5ForCausalLM

KEEPS_STATES = True
MTP_FIELD = "mtp_num_hidden_layers"

ARCHITECTURES = {"Qwen3_5ForCausalLM": Qwen3_5ForCausalLM}
