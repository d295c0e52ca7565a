"""The language model of multimodal Gemma 3."""

from workers.models.gemma3_text import Gemma3ForCausalLM

CONFIG_DEFAULTS = {"vocab_size": 262208, "max_position_embeddings": 131072, "rope_local_base_freq": 10000.0}

ARCHITECTURES = {"Gemma3ForConditionalGeneration": Gemma3ForCausalLM}
