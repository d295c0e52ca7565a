"""Gemma 3: norms before and after each block, sliding windows with a RoPE of their own in most layers."""

from collections.abc import Mapping
from typing import Any

from workers.layers.attention.rotary import ropes_by_type
from workers.layers.attention.window import every_nth_full, windows_by_type
from workers.layers.context import BuildContext
from workers.layers.decoder.decoder_args import SANDWICH_NORMS, DecoderArgs, common_fields
from workers.layers.decoder.decoder_lm import DecoderLM
from workers.layers.embedding import rounded

_DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
CONFIG_DEFAULTS = {"vocab_size": 262208, "max_position_embeddings": 131072, "rope_local_base_freq": 10000.0}
_THETAS = {"full_attention": 1000000.0, "sliding_attention": 10000.0}
_NOT_SUPPORTED = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")


class Gemma3ForCausalLM(DecoderLM):
    """Gemma's norms store their weights minus one, and its embeddings are scaled."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        config = {**_DEFAULTS, **config}
        for name in _NOT_SUPPORTED:
            if config.get(name):
                raise ValueError(f"{config['model_type']} with {name} {config[name]} is not supported")
        layers = config["num_hidden_layers"]
        types = config.get("layer_types") or every_nth_full(config["sliding_window_pattern"], layers)
        windows = windows_by_type(types, config["sliding_window"], layers)
        ropes = ropes_by_type(config, types, _THETAS)
        bias = config["attention_bias"]
        fields = {**config, "rope_parameters": ropes[0], "hidden_act": config["hidden_activation"]}
        args = DecoderArgs(
            **common_fields(fields),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm=True,
            windows=windows,
            ropes=ropes,
            norms=SANDWICH_NORMS,
            zero_centred_norms=True,
            attention_scale=config["query_pre_attn_scalar"] ** -0.5,
            sees_ahead="vision_config" in config,
            embedding_scale=rounded(config["hidden_size"] ** 0.5, build.dtype),  # as the embeddings are
        )
        super().__init__(config, args, build)


ARCHITECTURES = {"Gemma3ForCausalLM": Gemma3ForCausalLM}
