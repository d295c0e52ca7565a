"""Settings of GGUF files as config.json has them, and how their tensors differ, by general.architecture.

What llama.cpp's converter leaves out of a file follows from its architecture, as in llama.cpp itself: the
alternation of Gemma's windows, SmolLM3's layers without RoPE, the softmax scale of the largest Gemmas, the
chunks of Llama 4. Layers for multi-token prediction follow the others (`gguf_mtp`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gguf

_KNOWN_SCALING = (
    *("type", "factor", "original_context_length", "finetuned", "attn_factor"),
    *("yarn_log_multiplier", "yarn_beta_fast", "yarn_beta_slow"),
)
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_FEATURES, _EXPERT_FEATURES = "feed_forward_length", "expert_feed_forward_length"
_SOFTMAX, _SIGMOID = gguf.ExpertGatingFuncType.SOFTMAX, gguf.ExpertGatingFuncType.SIGMOID
_EXPERTS_OF_MAVERICK = 128
ROPE_FACTORS = "rope_freqs.weight"
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"


def metadata_value(reader: gguf.GGUFReader, key: str, default: Any = None) -> Any:
    """The value with this name in a file's metadata, or the default."""
    field = reader.get_field(key)
    return default if field is None else field.contents()


class Metadata:
    """A file's settings, without the architecture before their names, and its tensors by name."""

    def __init__(self, reader: gguf.GGUFReader, architecture: str):
        self._reader = reader
        self._architecture = architecture
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}

    def get(self, key: str, default: Any = None) -> Any:
        """The setting, or the default."""
        return self.value(f"{self._architecture}.{key}", default)

    def value(self, key: str, default: Any = None) -> Any:
        """The value with this whole name, or the default."""
        return metadata_value(self._reader, key, default)

    def need(self, key: str) -> Any:
        """The setting. Raises ValueError if there is none, or one for each layer."""
        value = self.get(key)
        if value is None or isinstance(value, list):
            what = "lacks" if value is None else "has one for each layer of"
            raise ValueError(f"its metadata {what} {self._architecture}.{key}")
        return value

    @property
    def layers(self) -> int:
        """Layers without those for multi-token prediction."""
        return int(self.need("block_count")) - int(self.get("nextn_predict_layers", 0))

    @property
    def mtp_layers(self) -> int:
        """Layers for multi-token prediction; 0 where the file states some and lacks their tensors."""
        whole = all(name in self.tensors for name in mtp_tensors(self.layers))
        return int(self.get("nextn_predict_layers", 0)) if whole else 0

    @property
    def scaling(self) -> dict[str, Any]:
        """The settings of RoPE scaling. Raises ValueError for one that is not supported."""
        prefix = f"{self._architecture}.rope.scaling."
        names = [name.removeprefix(prefix) for name in self._reader.fields if name.startswith(prefix)]
        if unknown := sorted(set(names) - set(_KNOWN_SCALING)):
            raise ValueError(f"its {prefix}{unknown[0]} is not supported")
        return {name: self.get(f"rope.scaling.{name}") for name in names}


def mtp_tensors(layer: int) -> list[str]:
    """The tensors that a layer for multi-token prediction has besides those of other layers."""
    return [f"blk.{layer}.nextn.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head_norm")]


Config = Mapping[str, Any]


@dataclass(frozen=True)
class GGUFFamily:
    """How the files of an architecture become a checkpoint of transformers' model."""

    config: Callable[[Metadata], Config]
    """Makes config.json, `model_type` included."""
    rotates_neighbours: bool = False
    """Whether llama.cpp rotates neighbouring features, and the file's queries and keys are in that order."""
    norm_offset: float = 0.0
    """What was added to the weights of all norms."""
    settings: frozenset[str] = frozenset()
    """Names of tensors that `config` reads."""
    expert_names: tuple[str, str, str] | None = ("gate_proj", "up_proj", "down_proj")
    """Names of an expert's matrices in the checkpoint; None: GPT-OSS's stacks of all experts."""
    experts_in: str = "mlp"
    """The module of a layer, in the checkpoint, that has the experts."""
    inputs_first: bool = False
    """Whether stacks of all experts have inputs before outputs (Llama 4)."""
    tiled_values: bool = False
    """Whether linear attention has the first value head of each key head, then the second, and so on."""
    names_of: str | None = None
    """Another architecture whose tensors have the same names, for one that the gguf package does not know."""
    mtp_apart: bool = False
    """Whether the checkpoint has the layer for multi-token prediction in mtp.*, and not after the others."""


def _common(data: Metadata) -> dict[str, Any]:
    """The settings of every decoder."""
    hidden, heads = data.need("embedding_length"), data.need("attention.head_count")
    return {
        "vocab_size": int(data.tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden,
        "intermediate_size": data.need(_FEATURES if data.get(_FEATURES) is not None else _EXPERT_FEATURES),
        "num_hidden_layers": data.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": data.get("attention.head_count_kv", heads),
        "head_dim": data.get("attention.key_length", hidden // heads),
        "max_position_embeddings": data.need("context_length"),
        "rms_norm_eps": data.need("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in data.tensors,
        "rope_parameters": _rope(data),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _rope(data: Metadata, theta: float = 10000.0) -> dict[str, Any]:
    """rope_parameters of layers with full attention."""
    plain = {"rope_type": "default", "rope_theta": data.get("rope.freq_base", theta)}
    return plain | rope_scaling(data)


def rope_scaling(data: Metadata) -> dict[str, Any]:
    """The entries of rope_parameters for linear scaling or YaRN. Raises ValueError for another type."""
    scaling = data.scaling
    kind = scaling.get("type", "none")
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise ValueError(f"its RoPE scaling {kind} is not supported")
    made = {"rope_type": kind, "factor": scaling.get("factor", 1.0)}
    if kind == "linear":
        return made
    made["original_max_position_embeddings"] = scaling.get(
        "original_context_length", data.need("context_length")
    )
    renamed = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
    made |= {name: scaling[key] for key, name in renamed.items() if key in scaling}
    if scaling.get("attn_factor", 1.0) != 1.0:
        raise ValueError(f"its YaRN with an attention factor of {scaling['attn_factor']} is not supported")
    return made


def _gemma_scale(data: Metadata, layers_of_largest: int) -> int:
    """query_pre_attn_scalar: the largest model of a family has another than the rest."""
    if data.need("block_count") == layers_of_largest:
        return int(data.need("embedding_length") // data.need("attention.head_count"))
    return int(data.need("attention.key_length"))


def _pattern(data: Metadata, period: int) -> list[str]:
    """`layer_types` by the file, or with full attention in every `period`-th layer."""
    layers = data.need("block_count")
    stated = data.get("attention.sliding_window_pattern", period)
    if isinstance(stated, int):
        stated = [(layer + 1) % stated != 0 for layer in range(layers)] if stated else [False] * layers
    return [_SLIDING if each else _FULL for each in stated]


def _gemma2(data: Metadata) -> Config:
    return _common(data) | {
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _gemma_scale(data, 46),
        "attn_logit_softcapping": data.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": data.get("final_logit_softcapping", 30.0),
        "sliding_window": data.get("attention.sliding_window", 4096),
        "layer_types": _pattern(data, 2),
    }


def _gemma3(data: Metadata) -> Config:
    window = data.get("attention.sliding_window", 0)
    types = _pattern(data, 6) if window else [_FULL] * data.need("block_count")
    local = {"rope_type": "default", "rope_theta": data.get("rope.freq_base_swa", 10000.0)}
    return _common(data) | {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _gemma_scale(data, 62),
        "final_logit_softcapping": data.get("final_logit_softcapping"),
        "sliding_window": window or None,
        "layer_types": types,
        "rope_parameters": {_FULL: _rope(data, 1e6), _SLIDING: local},
    }


def _phi3(data: Metadata) -> Config:
    made = _common(data)
    original = data.get("rope.scaling.original_context_length", made["max_position_embeddings"])
    rope = dict(made["rope_parameters"])
    width = data.get("rope.dimension_count", made["head_dim"])
    if width != made["head_dim"]:
        rope["partial_rotary_factor"] = width / made["head_dim"]
    if _LONG_FACTORS in data.tensors:
        rope |= {
            "rope_type": "longrope",
            "short_factor": data.tensors[_SHORT_FACTORS].data.tolist(),
            "long_factor": data.tensors[_LONG_FACTORS].data.tolist(),
            "original_max_position_embeddings": original,
            "attention_factor": data.need("rope.scaling.attn_factor"),
        }
    return made | {
        "model_type": "phi3",
        "rope_parameters": rope,
        "original_max_position_embeddings": original,
        # Phi-4 has none, and states 0.
        "sliding_window": data.get("attention.sliding_window") or None,
    }


def _olmo(data: Metadata) -> Config:
    made = _common(data)
    if not (window := data.get("attention.sliding_window", 0)):
        return made | {"model_type": "olmo2", "attention_bias": False}
    local = {"rope_type": "default", "rope_theta": made["rope_parameters"]["rope_theta"]}
    return made | {
        "model_type": "olmo3",
        "attention_bias": False,
        "sliding_window": window,
        "layer_types": _pattern(data, 4),
        "rope_parameters": {_FULL: made["rope_parameters"], _SLIDING: local},
    }


def _granite(data: Metadata) -> Config:
    # llama.cpp's converter marks by it the models without RoPE.
    if data.get("rope.scaling.finetuned", True) is False:
        raise ValueError("it is a Granite without RoPE, which is not supported as GGUF: use its safetensors")
    return _common(data) | {
        "model_type": "granite",
        "attention_bias": "blk.0.attn_q.bias" in data.tensors,
        "attention_multiplier": data.need("attention.scale"),
        "embedding_multiplier": data.get("embedding_scale", 1.0),
        "residual_multiplier": data.get("residual_scale", 1.0),
        "logits_scaling": data.get("logit_scale", 1.0),
    }


def _smollm3(data: Metadata) -> Config:
    return _common(data) | {
        "model_type": "smollm3",
        "no_rope_layer_interval": 4,
        "attention_bias": "blk.0.attn_q.bias" in data.tensors,
        "use_sliding_window": False,
    }


def _mistral3(data: Metadata) -> Config:
    made = _common(data) | {"sliding_window": None}
    beta = data.get("attention.temperature_scale", 0.0)
    if not beta:
        return made | {"model_type": "mistral"}
    all_dim = data.scaling.get("yarn_log_multiplier", 1.0)
    more = {"mscale": all_dim, "mscale_all_dim": all_dim, "llama_4_scaling_beta": beta}
    return made | {"model_type": "ministral3", "rope_parameters": {**made["rope_parameters"], **more}}


def _expert_counts(data: Metadata) -> dict[str, Any]:
    """Number of experts, of those for a token, and the size of one, by the names of most families."""
    return {
        "num_experts": data.need("expert_count"),
        "num_experts_per_tok": data.need("expert_used_count"),
        "moe_intermediate_size": data.need(_EXPERT_FEATURES),
        "norm_topk_prob": data.get("expert_weights_norm", True),
    }


def _mixtral(data: Metadata) -> Config:
    return _common(data) | {
        "model_type": "mixtral",
        "num_local_experts": data.need("expert_count"),
        "num_experts_per_tok": data.need("expert_used_count"),
        "sliding_window": data.get("attention.sliding_window"),
    }


def _qwen3moe(data: Metadata) -> Config:
    return _common(data) | _expert_counts(data) | {"model_type": "qwen3_moe", "decoder_sparse_step": 1}


def _llama4(data: Metadata) -> Config:
    """What llama.cpp knows of Llama 4 and the file does not say is the default in transformers, too."""
    if data.get("attention.sliding_window") == 0:
        raise ValueError("it is a Llama 4 without chunks, which is not supported as GGUF")
    experts = data.need("expert_count")
    return _common(data) | {
        "model_type": "llama4_text",
        "intermediate_size": data.need(_EXPERT_FEATURES),
        "intermediate_size_mlp": data.need(_FEATURES),
        "num_local_experts": experts,
        "num_experts_per_tok": data.need("expert_used_count"),
        "interleave_moe_layer_step": data.need("interleave_moe_layer_step"),
        # Maverick, one of the two published models, has none.
        "use_qk_norm": experts != _EXPERTS_OF_MAVERICK,
    }


def _qwen3vl(data: Metadata) -> Config:
    """The text of Qwen3-VL is a Qwen3: without images its three rotary positions are one."""
    return _common(data) | {"model_type": "qwen3"}


def _gpt_oss(data: Metadata) -> Config:
    made = _common(data)
    window, layers = data.need("attention.sliding_window"), made["num_hidden_layers"]
    # llama.cpp rounds YaRN's limits to whole features, and the model does not.
    untruncated = {"truncate": False} if made["rope_parameters"]["rope_type"] == "yarn" else {}
    return made | {
        "model_type": "gpt_oss",
        "intermediate_size": data.need(_EXPERT_FEATURES),
        "num_local_experts": data.need("expert_count"),
        "num_experts_per_tok": data.need("expert_used_count"),
        "attention_bias": True,
        "sliding_window": window,
        "layer_types": [_FULL if layer % 2 else _SLIDING for layer in range(layers)],
        "rope_parameters": made["rope_parameters"] | untruncated,
    }


def _routed(data: Metadata) -> dict[str, Any]:
    """The settings of DeepSeek's routing and shared experts."""
    return {
        "n_routed_experts": data.need("expert_count"),
        "num_experts_per_tok": data.need("expert_used_count"),
        "moe_intermediate_size": data.need(_EXPERT_FEATURES),
        "n_shared_experts": data.get("expert_shared_count", 0),
        "first_k_dense_replace": data.get("leading_dense_block_count", 0),
        "norm_topk_prob": data.get("expert_weights_norm", False),
        "routed_scaling_factor": data.get("expert_weights_scale", 1.0),
        "n_group": data.get("expert_group_count", 1),
        "topk_group": data.get("expert_group_used_count", 1),
        "num_nextn_predict_layers": data.mtp_layers,
    }


def _partial_rotary(data: Metadata, made: Mapping[str, Any]) -> dict[str, Any]:
    """rope_parameters, where not all features of a head are rotated."""
    factor = data.need("rope.dimension_count") / made["head_dim"]
    return {**made["rope_parameters"], "partial_rotary_factor": factor}


def _glm4moe(data: Metadata) -> Config:
    made = _common(data)
    return (
        made
        | _routed(data)
        | {
            "model_type": "glm4_moe",
            "use_qk_norm": "blk.0.attn_q_norm.weight" in data.tensors,
            "attention_bias": "blk.0.attn_q.bias" in data.tensors,
            "rope_parameters": _partial_rotary(data, made),
        }
    )


def _minimax_m2(data: Metadata) -> Config:
    made = _common(data)
    return made | {
        "model_type": "minimax_m2",
        "intermediate_size": data.need(_EXPERT_FEATURES),
        "num_local_experts": data.need("expert_count"),
        "num_experts_per_tok": data.need("expert_used_count"),
        "rope_parameters": _partial_rotary(data, made),
    }


def _latent_attention(data: Metadata, made: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of MLA."""
    rotated = data.need("rope.dimension_count")
    # Files of 2025 and later have the sizes of latents under the common names.
    of_key, of_value = (data.get(f"attention.{each}_length_mla") for each in ("key", "value"))
    return {
        "num_key_value_heads": made["num_attention_heads"],
        "head_dim": rotated,
        "q_lora_rank": data.get("attention.q_lora_rank"),
        "kv_lora_rank": data.need("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": (of_key or data.need("attention.key_length")) - rotated,
        "v_head_dim": of_value or data.need("attention.value_length"),
        "attention_bias": False,
    }


def _deepseek(data: Metadata) -> dict[str, Any]:
    """The settings of every DeepSeek V2 and its descendants, without `model_type`."""
    made = _common(data)
    rope = dict(made["rope_parameters"])
    if rope["rope_type"] == "yarn":
        # The converter stores a tenth of it; the model's other factor of YaRN is always the same.
        all_dim = round(10 * data.get("rope.scaling.yarn_log_multiplier", 0.0), 6)
        rope |= {"mscale": all_dim, "mscale_all_dim": all_dim} if all_dim else {}
    return made | _routed(data) | _latent_attention(data, made) | {"rope_parameters": rope}


def _deepseek2(data: Metadata) -> Config:
    """DeepSeek V2 with softmax routing; V3, Kimi-K2 and GLM-4.7-Flash with sigmoid routing."""
    made = _deepseek(data)
    if data.get("expert_gating_func", _SOFTMAX) == _SIGMOID:
        of_glm = data.value("tokenizer.ggml.pre") in ("glm4", "chatglm-bpe")
        return made | {"model_type": "glm4_moe_lite" if of_glm else "deepseek_v3"}
    grouped = made["n_group"] > 1
    return made | {
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy" if grouped else "greedy",
    }


def _sparse_attention(data: Metadata) -> dict[str, Any]:
    """DeepSeek's settings, with those of indexers."""
    return _deepseek(data) | {
        "index_n_heads": data.need("attention.indexer.head_count"),
        "index_head_dim": data.need("attention.indexer.key_length"),
        "index_topk": data.need("attention.indexer.top_k"),
    }


def _deepseek32(data: Metadata) -> Config:
    return _sparse_attention(data) | {"model_type": "deepseek_v32"}


def _glm_dsa(data: Metadata) -> Config:
    """The kind of each layer follows from its tensors: not all files state it."""
    indexers = [f"blk.{layer}.indexer.attn_k.weight" in data.tensors for layer in range(data.layers)]
    kinds = ["full" if each else "shared" for each in indexers]
    return _sparse_attention(data) | {"model_type": "glm_moe_dsa", "indexer_types": kinds}


def _kimi_linear(data: Metadata) -> Config:
    """Layers without keys and values for attention are those of Kimi delta attention."""
    made = _common(data)
    kinds = [_FULL if heads else _LINEAR for heads in made["num_key_value_heads"]]
    return (
        made
        | _routed(data)
        | _latent_attention(data, made)
        | {
            "model_type": "kimi_linear",
            "num_local_experts": data.need("expert_count"),
            "norm_topk_prob": data.get("expert_weights_norm", True),
            "layer_types": kinds,
            "linear_num_heads": made["num_attention_heads"],
            "linear_head_dim": data.need("kda.head_dim"),
            "linear_conv_kernel_dim": data.need("ssm.conv_kernel"),
        }
    )


def _delta_nets(data: Metadata) -> dict[str, Any]:
    """The settings of the families of Qwen3-Next, without experts."""
    made = _common(data)
    values, every = data.need("ssm.time_step_rank"), data.get("full_attention_interval", 4)
    layers = range(1, made["num_hidden_layers"] + 1)
    return made | {
        "layer_types": [_LINEAR if layer % every else _FULL for layer in layers],
        "linear_conv_kernel_dim": data.need("ssm.conv_kernel"),
        "linear_key_head_dim": data.need("ssm.state_size"),
        "linear_num_key_heads": data.need("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": data.need("ssm.inner_size") // values,
        "rope_parameters": _partial_rotary(data, made),
    }


def _shared_expert(data: Metadata) -> dict[str, Any]:
    return {"shared_expert_intermediate_size": data.need("expert_shared_feed_forward_length")}


def _qwen3next(data: Metadata) -> Config:
    more = {"model_type": "qwen3_next", "num_nextn_predict_layers": data.mtp_layers, "decoder_sparse_step": 1}
    return _delta_nets(data) | _expert_counts(data) | _shared_expert(data) | more


def _qwen35(data: Metadata) -> Config:
    return _delta_nets(data) | {"model_type": "qwen3_5_text", "mtp_num_hidden_layers": data.mtp_layers}


def _qwen35moe(data: Metadata) -> Config:
    more = {"model_type": "qwen3_5_moe_text", "mtp_num_hidden_layers": data.mtp_layers}
    return _delta_nets(data) | _expert_counts(data) | _shared_expert(data) | more


_W123 = ("w1", "w3", "w2")
MIXTRAL = GGUFFamily(_mixtral, rotates_neighbours=True, expert_names=_W123, experts_in="block_sparse_moe")
"""Files of the architecture llama with experts."""
GGUF_FAMILIES = {
    "gemma2": GGUFFamily(_gemma2, norm_offset=1.0),
    "gemma3": GGUFFamily(_gemma3, norm_offset=1.0),
    "phi3": GGUFFamily(_phi3, settings=frozenset({_LONG_FACTORS, _SHORT_FACTORS})),
    "olmo2": GGUFFamily(_olmo),
    "granite": GGUFFamily(_granite, rotates_neighbours=True),
    "smollm3": GGUFFamily(_smollm3, rotates_neighbours=True),
    "mistral3": GGUFFamily(_mistral3, rotates_neighbours=True),
    "qwen3moe": GGUFFamily(_qwen3moe),
    "gpt-oss": GGUFFamily(_gpt_oss, expert_names=None),
    "glm4moe": GGUFFamily(_glm4moe),
    "minimax-m2": GGUFFamily(_minimax_m2, expert_names=_W123, experts_in="block_sparse_moe"),
    "deepseek2": GGUFFamily(_deepseek2),
    "deepseek32": GGUFFamily(_deepseek32, names_of="glm-dsa"),
    "glm-dsa": GGUFFamily(_glm_dsa),
    "llama4": GGUFFamily(_llama4, inputs_first=True, settings=frozenset({ROPE_FACTORS})),
    "kimi-linear": GGUFFamily(_kimi_linear, expert_names=_W123, experts_in="block_sparse_moe"),
    "qwen3vl": GGUFFamily(_qwen3vl),
    "qwen3vlmoe": GGUFFamily(_qwen3moe),
    "qwen3next": GGUFFamily(_qwen3next, norm_offset=1.0, mtp_apart=True),
    "qwen35": GGUFFamily(_qwen35, norm_offset=1.0, tiled_values=True, mtp_apart=True),
    "qwen35moe": GGUFFamily(_qwen35moe, norm_offset=1.0, tiled_values=True, mtp_apart=True),
}


def why_refused(name: str, others: Sequence[str]) -> str | None:
    """Why files of an architecture are refused; None for a family here, or one of the `others`."""
    if name in GGUF_FAMILIES or name in others:
        return None
    return f"the architecture {name}; supported: {', '.join(sorted({*GGUF_FAMILIES, *others}))}"
