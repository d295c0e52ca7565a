"""A tiny model with a block drafter, and its drafts by definition.

The embedding of the mask is zero, and the drafter's attention is nearly even and passes on what it reads, so
that a block's drafts depend mostly on its last id: the first one is often right.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from atom.shared.config.checkpoint import Checkpoint
from tests.helpers.checkpoints.eagle3_models import HEADS, WIDTH, turned
from tests.helpers.checkpoints.tiny_models import VOCAB, Tiny, build_tiny, checkpoint_of

MASK = VOCAB - 1
_LAYERS = 2
_SMALL = 0.015
_WINDOW = 11
_TYPES = ["sliding_attention", "full_attention"]
VARIANTS: dict[str, dict[str, Any]] = {
    "sliding": {"layer_types": _TYPES, "sliding_window": _WINDOW},
    "ahead": {"layer_types": _TYPES[::-1], "sliding_window": _WINDOW, "is_causal": False},
    "ahead everywhere": {
        "dflash_config": {"use_swa": True, "swa_window_size": _WINDOW},
        "sliding_window": 99,
    },
    "causal": {"dflash_config": {"causal": True}},
    "vocabulary": {"draft_vocab_size": 140},
    "wide": {
        "hidden_size": HEADS * WIDTH + 32,
        "target_hidden_size": HEADS * WIDTH,
        "draft_vocab_size": VOCAB,
    },
}
"""Fields of config.json by which block drafters differ."""


@dataclass(frozen=True)
class DflashModel:
    """A saved model and its drafter."""

    checkpoint: Checkpoint
    built: Any
    drafter: Path
    tensors: dict[str, Tensor]
    """The drafter's, by their names in its checkpoint."""
    config: dict[str, Any]
    """The drafter's."""

    def drafts(self, ids: list[int], count: int) -> list[int]:
        """The greedy drafts after these ids."""
        if not count:
            return []
        head = self.tensors.get("lm_head.weight", self.built.lm_head.weight)
        best_K = (self.block(ids, 1 + count)[1:] @ head.T).argmax(-1)
        return (best_K + self.tensors["d2t"][best_K] if "d2t" in self.tensors else best_K).tolist()

    def block(self, ids: list[int], width: int) -> Tensor:
        """The drafter's hidden states of the last id and masks, [width, D]."""
        states = self.built(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
        layers = self._fields["target_layer_ids"]
        aux_TF = torch.cat([states[layer + 1][0] for layer in layers], -1)
        context_TD = self._norm("hidden_norm", aux_TF @ self.tensors["fc.weight"].T)
        embedding = self.tensors.get("embed_tokens.weight", self.built.model.embed_tokens.weight)
        x_BD = embedding[[ids[-1], *[MASK] * (width - 1)]]
        for layer in range(_LAYERS):
            x_BD = self._layer(
                f"layers.{layer}", x_BD, context_TD, self._hidden(layer, len(context_TD), width)
            )
        return self._norm("norm", x_BD)

    @property
    def _fields(self) -> dict[str, Any]:
        return {**self.config, **self.config.get("dflash_config", {})}

    def _hidden(self, layer: int, context: int, width: int) -> Tensor:
        """Which keys the tokens of a block do not see in a layer, [B, S]."""
        fields = self._fields
        types = fields.get("layer_types", ["full_attention"] * _LAYERS)
        is_sliding = types[layer] == "sliding_attention"
        is_causal = fields.get("is_causal", fields.get("causal", is_sliding))
        has_window = is_sliding or (fields.get("use_swa") and "sliding_attention" not in types)
        key_S = torch.arange(context + width)
        query_B1 = key_S[context:, None]
        hidden_BS = (key_S > query_B1) & bool(is_causal)
        if has_window:
            hidden_BS |= query_B1 - key_S >= fields.get("swa_window_size", fields["sliding_window"])
        return hidden_BS

    def _layer(self, at: str, x_BD: Tensor, context_TD: Tensor, hidden_BS: Tensor) -> Tensor:
        normed_BD = self._norm(f"{at}.input_layernorm", x_BD)
        both_SD = torch.cat((context_TD, normed_BD))
        q_BD, k_SD, v_SD = (
            rows @ self.tensors[f"{at}.self_attn.{name}_proj.weight"].T
            for name, rows in (("q", normed_BD), ("k", both_SD), ("v", both_SD))
        )
        q_HBE = turned(self._heads(f"{at}.self_attn.q_norm", q_BD), first=len(context_TD))
        k_HSE = turned(self._heads(f"{at}.self_attn.k_norm", k_SD))
        v_HSE = v_SD.unflatten(1, (HEADS, WIDTH)).transpose(0, 1)
        out_HBE = functional.scaled_dot_product_attention(q_HBE, k_HSE, v_HSE, ~hidden_BS)
        total_BD = x_BD + out_HBE.transpose(0, 1).flatten(1) @ self.tensors[f"{at}.self_attn.o_proj.weight"].T
        x_BD = self._norm(f"{at}.post_attention_layernorm", total_BD)
        gate, up, down = (self.tensors[f"{at}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return total_BD + (functional.silu(x_BD @ gate.T) * (x_BD @ up.T)) @ down.T

    def _heads(self, name: str, x_SD: Tensor) -> Tensor:
        return self._norm(name, x_SD.unflatten(1, (HEADS, WIDTH))).transpose(0, 1)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.tensors[f"{name}.weight"]


def save_dflash_model(
    model: Tiny, directory: Path, drafter: Path, fields: dict[str, Any] | None = None
) -> DflashModel:
    """Saves the row of the table, and a drafter for it, with these `fields` of its config.json.

    With `draft_vocab_size` it drafts tokens with even ids first, and has embedding and LM head of its own.
    """
    fields = fields or {}
    built: Any = build_tiny(model)
    hidden = built.config.hidden_size
    assert hidden == HEADS * WIDTH
    with torch.no_grad():
        built.model.embed_tokens.weight[MASK] = 0
        for name, weight in built.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.mul_(_SMALL)
    built.save_pretrained(directory)
    generator = torch.Generator().manual_seed(model.seed)

    own = fields.get("hidden_size", hidden)

    def noise(rows: int, columns: int, scale: float) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * scale * columns**-0.5

    def around(mean: float, size: int = own) -> Tensor:
        return mean * (0.95 + 0.1 * torch.rand(size, generator=generator))

    def widened(weight: Tensor) -> Tensor:
        return functional.pad(weight.detach(), (0, own - hidden))

    tensors = {
        "fc.weight": noise(own, 2 * hidden, 1.0),
        "hidden_norm.weight": around(0.02),
        "norm.weight": functional.pad(built.model.norm.weight.detach(), (0, own - hidden), value=1.0),
    }
    for layer in range(_LAYERS):
        at = f"layers.{layer}"
        passes = torch.eye(own, hidden) * (layer == 0)
        tensors |= {
            f"{at}.input_layernorm.weight": around(1.0),
            f"{at}.post_attention_layernorm.weight": around(1.0),
            f"{at}.self_attn.q_norm.weight": around(0.5, WIDTH),
            f"{at}.self_attn.k_norm.weight": around(0.5, WIDTH),
            f"{at}.self_attn.q_proj.weight": noise(hidden, own, 1.0),
            f"{at}.self_attn.k_proj.weight": noise(hidden, own, 1.0),
            f"{at}.self_attn.v_proj.weight": torch.eye(hidden, own) + noise(hidden, own, 0.05),
            f"{at}.self_attn.o_proj.weight": passes + noise(own, hidden, 0.05),
            f"{at}.mlp.gate_proj.weight": noise(100, own, 1.0),
            f"{at}.mlp.up_proj.weight": noise(100, own, 1.0),
            f"{at}.mlp.down_proj.weight": noise(own, 100, 0.001),
        }
    if draft_vocab := fields.get("draft_vocab_size"):
        kept = torch.arange(VOCAB).view(-1, 2).T.flatten()[:draft_vocab]
        tensors |= {
            "embed_tokens.weight": widened(built.model.embed_tokens.weight) + noise(VOCAB, own, 0.01),
            "lm_head.weight": widened(built.lm_head.weight)[kept].clone(),
            "d2t": kept - torch.arange(draft_vocab),
        }
    if draft_vocab == VOCAB:
        tensors["lm_head.weight"] = widened(built.lm_head.weight)
        del tensors["d2t"]
    save_file(tensors, drafter / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": 100,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": WIDTH,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "block_size": 8,
        "num_target_layers": built.config.num_hidden_layers,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1]},
    }
    for name, value in fields.items():
        config[name] = {**config[name], **value} if isinstance(value, dict) else value
    (drafter / "config.json").write_text(json.dumps(config))
    return DflashModel(checkpoint_of(directory), built, drafter, tensors, config)
