"""Gemma 2: norms before and after each block, capped scores and logits, a window in every second layer."""

from collections.abc import Mapping
from typing import Any

from workers.layers.attention.window import every_nth_full, windows_by_type
from workers.layers.context import BuildContext
from workers.layers.decoder.decoder_args import SANDWICH_NORMS, DecoderArgs, common_fields
from workers.layers.decoder.decoder_lm import DecoderLM
from workers.layers.embedding import rounded

_DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


class Gemma2ForCausalLM(DecoderLM):
    """Optional biases and caps; norms are stored minus one, and embeddings are scaled."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        config = {**_DEFAULTS, **config}
        if config.get("use_bidirectional_attention"):
            raise ValueError("gemma2 with use_bidirectional_attention is not supported")
        layers = config["num_hidden_layers"]
        types = config.get("layer_types") or every_nth_full(2, layers)
        bias = config["attention_bias"]
        args = DecoderArgs(
            **common_fields({**config, "hidden_act": config["hidden_activation"]}),
            qkv_bias=bias,
            o_bias=bias,
            windows=windows_by_type(types, config["sliding_window"], layers),
            norms=SANDWICH_NORMS,
            zero_centred_norms=True,
            attention_scale=config["query_pre_attn_scalar"] ** -0.5,
            attention_soft_cap=config["attn_logit_softcapping"] or 0.0,
            logits_soft_cap=config["final_logit_softcapping"] or 0.0,
            embedding_scale=rounded(config["hidden_size"] ** 0.5, build.dtype),  # as the embeddings are
        )
        super().__init__(config, args, build)


ARCHITECTURES = {"Gemma2ForCausalLM": Gemma2ForCausalLM}
