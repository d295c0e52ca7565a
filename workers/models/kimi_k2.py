"""Kimi-K2: the architecture of DeepSeek V3."""

from workers.models.deepseek_v3 import DeepseekV3ForCausalLM

ARCHITECTURES = {"DeepseekV3ForCausalLM": DeepseekV3ForCausalLM}
