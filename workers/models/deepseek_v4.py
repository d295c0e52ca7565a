"""DeepSeek-V4: compressed attention, hyper-connections, experts in all layers, some selected by token ids."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from atom_ops import ClampedSwiglu, RoutingRule, SamplingBatch
from workers.layers.attention.rotary import Rope, RotaryEmbedding
from workers.layers.attention.rotation import Rotation
from workers.layers.causal_lm import CausalLM
from workers.layers.config_values import check_value
from workers.layers.context import BuildContext, ForwardContext
from workers.layers.embedding import LMHead, VocabEmbedding
from workers.layers.hyper_connection import HyperArgs, HyperConnection, HyperHead
from workers.layers.mla.compressed_attention import (
    COMPRESSED_MODULES,
    CompressedArgs,
    CompressedAttention,
    Compression,
    LayerCaches,
    compressed_caches,
)
from workers.layers.moe.expert_layouts import PerExpert
from workers.layers.moe.moe import MoE, MoEArgs
from workers.layers.norm import RMSNorm

AUX_HIDDEN_STATES = False

_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "compress_rope_theta": 160000.0,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "num_hash_layers": 3,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "swiglu_limit": 10.0,
    "n_shared_experts": 1,
}
_ROPE_THETA = 10000.0
_SLIDING = "sliding_attention"
_SPARSE = "compressed_sparse_attention"
_DENSE = "heavily_compressed_attention"
_KIND_OF_RATIO = {0: _SLIDING, 4: _SPARSE, 128: _DENSE}
_RATES = {_SPARSE: 4, _DENSE: 128}


class DeepseekV4Layer(nn.Module):
    """Attention, then experts, each between hyper-connections."""

    def __init__(self, attn: CompressedAttention, moe: MoEArgs, hyper: HyperArgs, build: BuildContext):
        super().__init__()
        self.attn = attn
        self.ffn = MoE(moe, build.at("ffn"))
        self.attn_norm = RMSNorm(hyper.hidden_size, hyper.norm_eps, build)
        self.ffn_norm = RMSNorm(hyper.hidden_size, hyper.norm_eps, build)
        self.hc_attn = HyperConnection(hyper, "hc_attn", build)
        self.hc_ffn = HyperConnection(hyper, "hc_ffn", build)
        self._tp = build.tp

    def forward(
        self, streams_TND: torch.Tensor, ids_T: torch.Tensor, rotation: Rotation, ctx: ForwardContext
    ) -> torch.Tensor:
        streams_TND = self.hc_attn(
            streams_TND, lambda x_TD: self.attn(self.attn_norm(x_TD), rotation, ctx), self._tp
        )
        return self.hc_ffn(streams_TND, lambda x_TD: self.ffn(self.ffn_norm(x_TD), ids_T), self._tp)


class DeepseekV4Model(nn.Module):
    """Maps token ids to normalised hidden states."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        super().__init__()
        args = _attention_args(config)
        hyper = _hyper_args(config)
        self.kv_groups, caches = compressed_caches(args)
        self._streams = hyper.streams
        self.embed_tokens = VocabEmbedding(
            config["vocab_size"], hyper.hidden_size, build.at("model.embed_tokens")
        )
        main, compressed = (RotaryEmbedding(args.rope_dim, rope, build, True) for rope in _ropes(config))
        self.rotary = nn.ModuleList([main, compressed])
        self._rope_of_layers = [int(by is not None) for by in args.compressions]
        self.layers = nn.ModuleList(
            self._layer(config, args, number, caches[number], build) for number in range(len(caches))
        )
        self.norm = RMSNorm(hyper.hidden_size, hyper.norm_eps, build)
        self.hc_head = HyperHead(hyper, build)

    def _layer(
        self,
        config: Mapping[str, Any],
        args: CompressedArgs,
        number: int,
        caches: LayerCaches,
        build: BuildContext,
    ) -> DeepseekV4Layer:
        at = build.at(f"model.layers.{number}")
        rotary = self.rotary[self._rope_of_layers[number]]
        assert isinstance(rotary, RotaryEmbedding)
        attn = CompressedAttention(args, number, caches, rotary, at.at("attn"))
        return DeepseekV4Layer(attn, _moe_args(config, number), _hyper_args(config), at)

    def forward(self, ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        rotations = [rotary(positions_T) for rotary in self.rotary]
        streams_TND = self.embed_tokens(ids_T).unsqueeze(1).repeat(1, self._streams, 1)
        for layer, rope in zip(self.layers, self._rope_of_layers, strict=True):
            streams_TND = layer(streams_TND, ids_T, rotations[rope], ctx)
        hidden_TD: torch.Tensor = self.norm(self.hc_head(streams_TND))
        return hidden_TD


class DeepseekV4ForCausalLM(CausalLM):
    """The layers for multi-token prediction (mtp.*) are not loaded."""

    packed_modules_mapping: ClassVar = {**COMPRESSED_MODULES, "gate_up_proj": ("w1", "w3")}
    renamed_on_disk: ClassVar = {"down_proj": "w2"}
    beginnings_on_disk: ClassVar = {
        "layers.": "model.layers.",
        "norm.": "model.norm.",
        "embed.": "model.embed_tokens.",
        "head.": "lm_head.",
        "hc_head_": "model.hc_head.hc_",
    }
    unused_on_disk: tuple[str, ...] = ("mtp.*", "model.mtp.*")

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        super().__init__(config, build)
        config = {**_DEFAULTS, **config}
        _check_supported(config, build)
        self.model = DeepseekV4Model(config, build)
        self.kv_groups = [*self.model.kv_groups]
        tied = self.model.embed_tokens if config.get("tie_word_embeddings") else None
        self.lm_head = LMHead(config["vocab_size"], config["hidden_size"], build.at("lm_head"), tied)
        if tied is not None:
            self.unused_on_disk += ("lm_head.weight",)

    def forward(self, ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        hidden_TD: torch.Tensor = self.model(ids_T, positions_T, ctx)
        return hidden_TD

    def compute_logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        logits_RV: torch.Tensor = self.lm_head(hidden_RD)
        return logits_RV

    def sample(
        self, hidden_RD: torch.Tensor, settings: SamplingBatch, positions_R: torch.Tensor
    ) -> torch.Tensor:
        return self.lm_head.sample(hidden_RD, settings, positions_R)


def _check_supported(config: Mapping[str, Any], build: BuildContext) -> None:
    for name in ("attention_bias", "mlp_bias"):
        check_value(config, name, False)
    check_value(config, "num_key_value_heads", 1)
    check_value(config, "norm_topk_prob", True)
    if build.kv_dtype not in (None, build.dtype):
        raise ValueError(
            "--kv-cache-dtype: deepseek_v4 caches rows and entries in the dtype of the model; omit the flag"
        )


def _attention_args(config: Mapping[str, Any]) -> CompressedArgs:
    return CompressedArgs(
        hidden_size=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        head_dim=config["head_dim"],
        rope_dim=config["qk_rope_head_dim"],
        q_lora_rank=config["q_lora_rank"],
        window=config["sliding_window"],
        o_groups=config["o_groups"],
        o_lora_rank=config["o_lora_rank"],
        index_heads=config["index_n_heads"],
        index_width=config["index_head_dim"],
        index_topk=config["index_topk"],
        eps=config["rms_norm_eps"],
        compressions=_compressions(config),
    )


def _compressions(config: Mapping[str, Any]) -> list[Compression | None]:
    """Raises ValueError for unknown kinds of layers, or too few."""
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [_KIND_OF_RATIO.get(ratio, f"compress_ratio {ratio}") for ratio in config["compress_ratios"]]
    kinds = list(kinds)[:layers]  # of those for multi-token prediction, too, in published checkpoints
    rates = {**_RATES, **(config.get("compress_rates") or {})}
    known = {
        _SLIDING: None,
        _SPARSE: Compression("sparse", rates[_SPARSE]),
        _DENSE: Compression("dense", rates[_DENSE]),
    }
    if len(kinds) != layers or not known.keys() >= set(kinds):
        raise ValueError(f"deepseek_v4 with layers {kinds} is not supported; supported: {', '.join(known)}")
    return [known[kind] for kind in kinds]


def _ropes(config: Mapping[str, Any]) -> Sequence[Rope]:
    """RoPE of layers without compression, and of those with it; YaRN scales no cosines here."""
    stated = config["rope_parameters"]
    if isinstance(stated.get("main"), Mapping):
        main, compressed = stated["main"], stated["compress"]
    else:
        main = {"rope_theta": stated.get("rope_theta", _ROPE_THETA)}
        compressed = {**stated, "rope_theta": config["compress_rope_theta"]}
        if compressed.get("rope_type") == "yarn":
            compressed = {"attention_factor": 1.0, **compressed}
    # The tables are made for the part of a head that has RoPE.
    return [{**rope, "partial_rotary_factor": 1.0} for rope in (main, compressed)]


def _hyper_args(config: Mapping[str, Any]) -> HyperArgs:
    return HyperArgs(
        hidden_size=config["hidden_size"],
        streams=config["hc_mult"],
        iterations=config["hc_sinkhorn_iters"],
        norm_eps=config["rms_norm_eps"],
        eps=config["hc_eps"],
    )


def _moe_args(config: Mapping[str, Any], layer: int) -> MoEArgs:
    clamp = ClampedSwiglu(config["swiglu_limit"], alpha=1.0, shift=0.0)
    features = config["moe_intermediate_size"]
    hashed = _is_hashed(config, layer)
    return MoEArgs(
        hidden_size=config["hidden_size"],
        num_experts=config["n_routed_experts"],
        expert_features=features,
        rule=RoutingRule(
            config["num_experts_per_tok"],
            config["scoring_func"],
            renormalise=True,
            scale=config["routed_scaling_factor"],
        ),
        hidden_act=config.get("hidden_act", "silu"),
        activation=clamp,
        router_dtype=torch.float32,
        correction_bias=not hashed,
        correction_bias_name="bias",
        shared_features=config["n_shared_experts"] * features,
        shared_activation=clamp,
        hashed_ids=config["vocab_size"] if hashed else 0,
        layout=PerExpert(gate="w1", up="w3", down="w2"),
    )


def _is_hashed(config: Mapping[str, Any], layer: int) -> bool:
    kinds = config.get("mlp_layer_types")
    return layer < config["num_hash_layers"] if kinds is None else kinds[layer] == "hash_moe"


ARCHITECTURES = {"DeepseekV4ForCausalLM": DeepseekV4ForCausalLM}
