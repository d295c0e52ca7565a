"""DeepSeek-V4: compressed attention, hyper-connections, experts in all layers, some selected by token ids.

Multi-token prediction, from the streams of token i before they are summed:

    stream of token i ─ hnorm ─ h_proj ───────┐
                                              + ─ layer ─► streams ─ hc_head ─ norm ─ LM head ► token i + 2
    embedding of token i + 1 ─ enorm ─ e_proj ┘

So with it the model's hidden states are the streams, [T, N * D], which are summed where tokens are sampled.

T tokens, R sampling rows, N streams, D hidden, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from atom_ops import ClampedSwiglu, RoutingRule, SamplingBatch
from workers.layers.attention.rotary import Rope, RotaryEmbedding
from workers.layers.attention.rotation import Rotation
from workers.layers.config_values import check_value
from workers.layers.context import BuildContext, ForwardContext, ImageTokens
from workers.layers.embedding import LMHead, VocabEmbedding
from workers.layers.hyper_connection import HyperArgs, HyperConnection, HyperHead
from workers.layers.linear import ColumnParallelLinear
from workers.layers.mla.compressed_attention import (
    COMPRESSED_MODULES,
    CompressedArgs,
    CompressedAttention,
    Compression,
    compressed_caches,
)
from workers.layers.moe.expert_layouts import PerExpert
from workers.layers.moe.moe import MoE, MoEArgs
from workers.layers.mtp import PredictingModel
from workers.layers.norm import RMSNorm
from workers.layers.weighted import ShardRange

AUX_HIDDEN_STATES = False
MTP_FIELD = "num_nextn_predict_layers"

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


Layer = TypeVar("Layer", bound="DeepseekV4Layer")


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


class DeepseekV4Prediction(DeepseekV4Layer):
    """The layer for multi-token prediction, without embedding and LM head."""

    def __init__(self, attn: CompressedAttention, moe: MoEArgs, hyper: HyperArgs, build: BuildContext):
        super().__init__(attn, moe, hyper, build)
        self.enorm = RMSNorm(hyper.hidden_size, hyper.norm_eps, build)
        self.hnorm = RMSNorm(hyper.hidden_size, hyper.norm_eps, build)
        whole = [ShardRange.whole(hyper.hidden_size)]
        self.e_proj = ColumnParallelLinear(hyper.hidden_size, whole, False, build.at("e_proj"))
        self.h_proj = ColumnParallelLinear(hyper.hidden_size, whole, False, build.at("h_proj"))
        self.hc_head = HyperHead(hyper, ".hc_head", build)
        self.norm = RMSNorm(hyper.hidden_size, hyper.norm_eps, build)

    def pairs(self, embedded_TD: torch.Tensor, streams_TND: torch.Tensor) -> torch.Tensor:
        """What the layer reads, [T, N, D]: each stream of a token, with the embedding of the next one."""
        projected_MD = self.h_proj(self.hnorm(streams_TND.flatten(0, 1)))
        of_next_TD = self.e_proj(self.enorm(embedded_TD))
        return projected_MD.view_as(streams_TND) + of_next_TD.unsqueeze(1)

    def summed(self, streams_RND: torch.Tensor) -> torch.Tensor:
        """What the LM head reads, [R, D]."""
        hidden_RD: torch.Tensor = self.norm(self.hc_head(streams_RND))
        return hidden_RD


class DeepseekV4Model(nn.Module):
    """Maps token ids to streams, and these to normalised hidden states."""

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        super().__init__()
        args = _attention_args(config, build.mtp)
        hyper = _hyper_args(config)
        self.kv_groups, self._caches = compressed_caches(args)
        self._args = args
        self.num_streams = hyper.streams
        self.embed_tokens = VocabEmbedding(
            config["vocab_size"], hyper.hidden_size, build.at("model.embed_tokens")
        )
        main, compressed = (RotaryEmbedding(args.rope_dim, rope, build, True) for rope in _ropes(config))
        self.rotary = nn.ModuleList([main, compressed])
        self.layers = nn.ModuleList(
            self.make_layer(DeepseekV4Layer, config, number, build.at(f"model.layers.{number}"))
            for number in range(config["num_hidden_layers"])
        )
        self.norm = RMSNorm(hyper.hidden_size, hyper.norm_eps, build)
        self.hc_head = HyperHead(hyper, "hc", build)

    def make_layer(
        self, kind: type[Layer], config: Mapping[str, Any], number: int, build: BuildContext
    ) -> Layer:
        """Layer `number`, of this class."""
        attn = CompressedAttention(
            self._args, number, self._caches[number], self.rotary_of(number), build.at("attn")
        )
        return kind(attn, _moe_args(config, number), _hyper_args(config), build)

    def check_prediction(self) -> None:
        """Raise ValueError if the layer for multi-token prediction caches more than rows of tokens."""
        by = self._args.compressions[len(self.layers)]
        if by is not None:
            raise ValueError(
                f"--method mtp: a layer for multi-token prediction with {by.kind} compressed attention is "
                "not supported; omit the flag"
            )

    def rotary_of(self, number: int) -> RotaryEmbedding:
        """The RoPE of a layer: that with compression has its own."""
        rotary = self.rotary[int(self._args.compressions[number] is not None)]
        assert isinstance(rotary, RotaryEmbedding)
        return rotary

    def forward(self, ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """The streams after the last layer, [T, N, D]."""
        rotations = [rotary(positions_T) for rotary in self.rotary]
        streams_TND = self.embed_tokens(ids_T).unsqueeze(1).repeat(1, self.num_streams, 1)
        for layer, by in zip(self.layers, self._args.compressions, strict=False):  # the last may predict
            streams_TND = layer(streams_TND, ids_T, rotations[int(by is not None)], ctx)
        return streams_TND

    def summed(self, streams_RND: torch.Tensor) -> torch.Tensor:
        """What the LM head reads, [R, D]."""
        hidden_RD: torch.Tensor = self.norm(self.hc_head(streams_RND))
        return hidden_RD


class DeepseekV4ForCausalLM(PredictingModel):
    """The first layer for multi-token prediction (mtp.0.*) is loaded on request, others never."""

    model: DeepseekV4Model
    lm_head: LMHead
    mtp: DeepseekV4Prediction | None

    packed_modules_mapping: ClassVar = {**COMPRESSED_MODULES, "gate_up_proj": ("w1", "w3")}
    renamed_on_disk: ClassVar = {"down_proj": "w2"}
    beginnings_on_disk: ClassVar = {
        "layers.": "model.layers.",
        "norm.": "model.norm.",
        "embed.": "model.embed_tokens.",
        "head.": "lm_head.",
        "hc_head_": "model.hc_head.hc_",
    }

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        super().__init__(config, build)
        config = {**_DEFAULTS, **config}
        _check_supported(config, build)
        self.model = DeepseekV4Model(config, build)
        self.mtp = None
        self.unused_on_disk: tuple[str, ...] = ("mtp.*", "model.mtp.*")
        if build.mtp:
            self.model.check_prediction()
            at = build.at("mtp.0")
            number = config["num_hidden_layers"]
            self.mtp = self.model.make_layer(DeepseekV4Prediction, config, number, at)
            self.renamed_on_disk = {**self.renamed_on_disk, "mtp": at.prefix}  # type: ignore[misc]
            self.unused_on_disk = ("mtp.0.emb*", "mtp.0.head.*")  # the model's
        self.kv_groups = [*self.model.kv_groups]
        tied = self.model.embed_tokens if config.get("tie_word_embeddings") else None
        self.lm_head = LMHead(config["vocab_size"], config["hidden_size"], build.at("lm_head"), tied)
        if tied is not None:
            self.unused_on_disk += ("lm_head.weight",)

    def forward(self, ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Final hidden states [T, D]; with multi-token prediction the streams, [T, N * D]."""
        streams_TND = self.model(ids_T, positions_T, ctx)
        return self.model.summed(streams_TND) if self.mtp is None else streams_TND.flatten(1)

    def compute_logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        logits_RV: torch.Tensor = self.lm_head(self._summed(hidden_RD))
        return logits_RV

    def sample(
        self, hidden_RD: torch.Tensor, settings: SamplingBatch, positions_R: torch.Tensor
    ) -> torch.Tensor:
        return self.lm_head.sample(self._summed(hidden_RD), settings, positions_R)

    def predict(
        self,
        next_ids_T: torch.Tensor,
        hidden_TD: torch.Tensor,
        positions_T: torch.Tensor,
        ctx: ForwardContext,
        images: ImageTokens | None = None,
    ) -> torch.Tensor:
        assert self.mtp is not None and images is None, "the layer was requested, and the model reads text"
        streams_TND = self.mtp.pairs(self.model.embed_tokens(next_ids_T), self._streams(hidden_TD))
        rotation = self.model.rotary_of(len(self.model.layers))(positions_T)
        predicted_TND: torch.Tensor = self.mtp(streams_TND, next_ids_T, rotation, ctx)
        return predicted_TND.flatten(1)

    def sample_predicted(
        self, hidden_RD: torch.Tensor, settings: SamplingBatch, positions_R: torch.Tensor
    ) -> torch.Tensor:
        assert self.mtp is not None, "the layer was requested"
        return self.lm_head.sample(self.mtp.summed(self._streams(hidden_RD)), settings, positions_R)

    def _summed(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """What the LM head reads of what `forward` has returned."""
        return hidden_RD if self.mtp is None else self.model.summed(self._streams(hidden_RD))

    def _streams(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        streams = self.model.num_streams
        return hidden_TD.view(len(hidden_TD), streams, hidden_TD.shape[1] // streams)


def _check_supported(config: Mapping[str, Any], build: BuildContext) -> None:
    for name in ("attention_bias", "mlp_bias"):
        check_value(config, name, False)
    check_value(config, "num_key_value_heads", 1)
    check_value(config, "norm_topk_prob", True)
    if build.kv_dtype not in (None, build.dtype):
        raise ValueError(
            "--kv-cache-dtype: deepseek_v4 caches rows and entries in the dtype of the model; omit the flag"
        )


def _attention_args(config: Mapping[str, Any], predicts: bool) -> CompressedArgs:
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
        compressions=_compressions(config, config["num_hidden_layers"] + predicts),
    )


def _compressions(config: Mapping[str, Any], layers: int) -> list[Compression | None]:
    """The compression of each layer: lists may leave out one for multi-token prediction, which has none.

    Raises ValueError for unknown kinds of layers, or too few.
    """
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [_KIND_OF_RATIO.get(ratio, f"compress_ratio {ratio}") for ratio in config["compress_ratios"]]
    kinds = list(kinds)[:layers]  # in published checkpoints those for multi-token prediction are listed, too
    if len(kinds) == config["num_hidden_layers"] < layers:
        kinds.append(_SLIDING)
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
    return layer < config["num_hash_layers"] if kinds is None else kinds[layer : layer + 1] == ["hash_moe"]


ARCHITECTURES = {"DeepseekV4ForCausalLM": DeepseekV4ForCausalLM}
