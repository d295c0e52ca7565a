"""Llama 2, 3 and 3.1, and what shares their graph (SmolLM2, TinyLlama, …)."""

from collections.abc import Mapping
from typing import Any

from workers.layers.context import BuildContext
from workers.layers.decoder import DecoderArgs, DecoderLM, common_fields

_DEFAULTS = {"rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False}


class LlamaForCausalLM(DecoderLM):
    """The plain decoder; biases where the configuration asks for them."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        stated = {**_DEFAULTS, **config}
        bias = stated["attention_bias"]
        args = DecoderArgs(**common_fields(stated), qkv_bias=bias, o_bias=bias, mlp_bias=stated["mlp_bias"])
        super().__init__(config, args, build)


ARCHITECTURES = {"LlamaForCausalLM": LlamaForCausalLM}
