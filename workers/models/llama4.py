"""The language model of multimodal Llama 4."""

from workers.models.llama4_text import Llama4ForCausalLM

ARCHITECTURES = {"Llama4ForConditionalGeneration": Llama4ForCausalLM}
