"""The language models of multimodal Mistral Small 3.1 and 3.2, and of Ministral 3; of 4 see `mistral4`."""

from workers.models.ministral3 import Ministral3ForCausalLM

ARCHITECTURES = {"Mistral3ForConditionalGeneration": Ministral3ForCausalLM}
