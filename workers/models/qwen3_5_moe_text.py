"""Qwen3.5 with experts in a directory of its text model alone."""

from workers.models.qwen3_5_moe import Qwen3_5MoeForCausalLM

KEEPS_STATES = True
MTP_FIELD = "mtp_num_hidden_layers"

ARCHITECTURES = {"Qwen3_5MoeForCausalLM": Qwen3_5MoeForCausalLM}
