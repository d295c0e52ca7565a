"""Kimi-K2: DeepSeek V3 by another name."""

from workers.models.deepseek_v3 import DeepseekV3ForCausalLM

ARCHITECTURES = {"DeepseekV3ForCausalLM": DeepseekV3ForCausalLM}
