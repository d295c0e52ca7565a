"""A tiny model with an EAGLE-3 head, and its drafts by definition.

The model's layers add little to the residual stream, and the head's attention nearly passes on the embedding
of its own token, so that the next token depends mostly on the last one and many drafts are right.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from atom.shared.config.checkpoint import Checkpoint
from tests.helpers.checkpoints.tiny_models import VOCAB, Tiny, build_tiny, checkpoint_of

HEADS, WIDTH = 4, 18
NOPE, ROPE, LATENT = 10, 8, 72
"""The sizes of a head with multi-head latent attention; a value has WIDTH features."""
_SMALL, _SHARP = 0.015, 3.0
_BASE = 10000.0


_LATENT_SETTINGS = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v3",
    "q_lora_rank": LATENT,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": WIDTH,
}
_OF_LAYER = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *(
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "rope_theta",
        "model_type",
    ),
}
"""What the speculators library writes to transformer_layer_config."""


@dataclass(frozen=True)
class Eagle3Model:
    """A saved model and its head."""

    checkpoint: Checkpoint
    built: Any
    head: Path
    tensors: dict[str, Tensor]
    """The head's, by their names in its checkpoint, with midlayer."""
    config: dict[str, Any]
    """The head's."""

    def drafts(self, ids: list[int], count: int) -> list[int]:
        """The greedy drafts after these ids."""
        layers = self.config.get("eagle_aux_hidden_state_layer_ids") or [2, 1, 0]
        states = self.built(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
        hidden_TD = self._combined([states[layer][0] for layer in layers])
        next_ids = ids[1:]
        drafts: list[int] = []
        while len(drafts) < count:
            total_TD = self._layer(hidden_TD, next_ids)
            normed_D = self._norm("norm", total_TD[-1])
            best = int((normed_D @ self.tensors["lm_head.weight"].T).argmax())
            drafts.append(best + int(self.tensors["d2t"][best]) if "d2t" in self.tensors else best)
            kept_D = normed_D if self.config.get("norm_output") else total_TD[-1]
            hidden_TD = torch.cat((hidden_TD, kept_D[None]))
            next_ids = [*next_ids, drafts[-1]]
        return drafts

    def _combined(self, states: list[Tensor]) -> Tensor:
        if self.config.get("fc_norm"):
            states = [self._norm(f"fc_norm.{place}", state) for place, state in enumerate(states)]
        states_TF = torch.cat(states, -1)
        if self.config.get("norm_before_fc"):
            states_TF = self._norm("input_norm", states_TF)
        return states_TF @ self.tensors["fc.weight"].T

    def _layer(self, hidden_TD: Tensor, next_ids: list[int]) -> Tensor:
        own = self.tensors.get("embed_tokens.weight", self.built.model.embed_tokens.weight)
        normed_TD = self._norm("midlayer.hidden_norm", hidden_TD)
        both_T2D = torch.cat((self._norm("midlayer.input_layernorm", own[next_ids]), normed_TD), -1)
        residual_TD = normed_TD if self.config.get("norm_before_residual") else hidden_TD
        total_TD = residual_TD + self._attended(both_T2D)
        x_TD = self._norm("midlayer.post_attention_layernorm", total_TD)
        gate, up, down = (self.tensors[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return total_TD + (functional.silu(x_TD @ gate.T) * (x_TD @ up.T)) @ down.T

    def _attended(self, x_T2D: Tensor) -> Tensor:
        if "midlayer.self_attn.kv_b_proj.weight" in self.tensors:
            return self._attended_latents(x_T2D)
        q, k, v, o = (self.tensors[f"midlayer.self_attn.{name}_proj.weight"] for name in "qkvo")
        q_HTE, k_HTE, v_HTE = ((x_T2D @ w.T).unflatten(1, (HEADS, WIDTH)).transpose(0, 1) for w in (q, k, v))
        out_HTE = functional.scaled_dot_product_attention(turned(q_HTE), turned(k_HTE), v_HTE, is_causal=True)
        return out_HTE.transpose(0, 1).flatten(1) @ o.T

    def _attended_latents(self, x_T2D: Tensor) -> Tensor:
        """Multi-head latent attention, its RoPE over pairs of neighbours."""
        rows_TK = x_T2D @ self.tensors["midlayer.self_attn.kv_a_proj_with_mqa.weight"].T
        latent_TC = self._norm("midlayer.self_attn.kv_a_layernorm", rows_TK[:, :-ROPE])
        kv_HTX = self._by_head("kv_b_proj", latent_TC)
        query_TQ = x_T2D @ self.tensors["midlayer.self_attn.q_a_proj.weight"].T
        q_HTE = self._by_head("q_b_proj", self._norm("midlayer.self_attn.q_a_layernorm", query_TQ))
        key_TR = turned(apart(rows_TK[None, :, -ROPE:]))
        k_HTE = torch.cat((kv_HTX[..., :NOPE], key_TR.expand(HEADS, -1, -1)), -1)
        q_HTE = torch.cat((q_HTE[..., :NOPE], turned(apart(q_HTE[..., NOPE:]))), -1)
        out_HTV = functional.scaled_dot_product_attention(q_HTE, k_HTE, kv_HTX[..., NOPE:], is_causal=True)
        return out_HTV.transpose(0, 1).flatten(1) @ self.tensors["midlayer.self_attn.o_proj.weight"].T

    def _by_head(self, name: str, x_TD: Tensor) -> Tensor:
        projected_TO = x_TD @ self.tensors[f"midlayer.self_attn.{name}.weight"].T
        return projected_TO.unflatten(1, (HEADS, -1)).transpose(0, 1)

    def _norm(self, name: str, x_TD: Tensor) -> Tensor:
        return x_TD * (x_TD.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.tensors[f"{name}.weight"]


def save_eagle3_model(
    model: Tiny,
    directory: Path,
    head: Path,
    draft_vocab: int = VOCAB,
    layer: str = "midlayer",
    latent: bool = False,
    speculators: bool = False,
    **config: Any,
) -> Eagle3Model:
    """Saves the row of the table, and a head with these settings.

    `layer` is its layer's name on disk; `latent`: with multi-head latent attention; `speculators`: its
    config.json is one of that library.
    """
    built: Any = build_tiny(model)
    hidden = built.config.hidden_size
    assert hidden == HEADS * WIDTH
    with torch.no_grad():
        for name, weight in built.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.mul_(_SMALL)
    built.save_pretrained(directory)
    generator = torch.Generator().manual_seed(model.seed)

    def noise(rows: int, columns: int, scale: float) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * scale * columns**-0.5

    def ones() -> Tensor:
        return 0.95 + 0.1 * torch.rand(hidden, generator=generator)

    sharp = noise(hidden, hidden, _SHARP)
    tensors = {
        "fc.weight": noise(hidden, 3 * hidden, 0.1),
        "norm.weight": built.model.norm.weight.detach().clone(),
        "midlayer.hidden_norm.weight": ones(),
        "midlayer.input_layernorm.weight": ones(),
        "midlayer.post_attention_layernorm.weight": ones(),
        "midlayer.self_attn.q_proj.weight": torch.cat((sharp, noise(hidden, hidden, 0.1)), 1),
        "midlayer.self_attn.k_proj.weight": torch.cat((sharp, noise(hidden, hidden, 0.1)), 1),
        "midlayer.self_attn.v_proj.weight": torch.eye(hidden, 2 * hidden) + noise(hidden, 2 * hidden, 0.05),
        "midlayer.self_attn.o_proj.weight": torch.eye(hidden) + noise(hidden, hidden, 0.05),
        "midlayer.mlp.gate_proj.weight": noise(100, hidden, 1.0),
        "midlayer.mlp.up_proj.weight": noise(100, hidden, 1.0),
        "midlayer.mlp.down_proj.weight": noise(hidden, 100, 0.1),
        "lm_head.weight": built.lm_head.weight.detach().clone(),
    }
    if latent:
        tensors = {name: each for name, each in tensors.items() if "self_attn" not in name}
        tensors |= _latent_tensors(noise, ones)
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{place}.weight": ones() for place in range(3)}
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = torch.cat([ones() for _ in range(3)])
    if config.get("own_embedding"):
        tensors["embed_tokens.weight"] = built.model.embed_tokens.weight.detach().clone()
    if draft_vocab < VOCAB:
        kept = torch.randperm(VOCAB, generator=generator)[:draft_vocab].sort().values
        tensors["lm_head.weight"] = tensors["lm_head.weight"][kept].clone()
        tensors["d2t"] = kept - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, kept, True)
    saved = {name.replace("midlayer", layer): tensor for name, tensor in tensors.items()}
    save_file(saved, head / "model.safetensors", metadata={"format": "pt"})
    settings = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "draft_vocab_size": draft_vocab,
        "hidden_size": hidden,
        "intermediate_size": 100,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": WIDTH,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "rope_theta": _BASE,
        "dtype": "float32",
    } | {name: value for name, value in config.items() if name != "own_embedding"}
    if latent:
        settings |= _LATENT_SETTINGS
    if speculators:
        inner = {name: settings.pop(name) for name in [*settings] if name in _OF_LAYER}
        settings |= {"architectures": ["Eagle3Speculator"], "model_type": "speculators"}
        settings |= {"speculators_model_type": "eagle3", "transformer_layer_config": inner}
    (head / "config.json").write_text(json.dumps(settings))
    return Eagle3Model(checkpoint_of(directory), built, head, tensors, settings)


def _latent_tensors(
    noise: Callable[[int, int, float], Tensor], ones: Callable[[], Tensor]
) -> dict[str, Tensor]:
    """Latents that are embeddings; each head attends to its own token, and passes on a part of it."""
    hidden = LATENT
    sharp_HND = noise(HEADS * NOPE, hidden, _SHARP).unflatten(0, (HEADS, NOPE))
    part_HVD = torch.eye(hidden).unflatten(0, (HEADS, WIDTH))
    rope_HRD = noise(HEADS * ROPE, hidden, 0.3).unflatten(0, (HEADS, ROPE))
    embedding = torch.eye(hidden, 2 * hidden)
    tensors = {
        "q_a_proj": embedding + noise(hidden, 2 * hidden, 0.05),
        "q_a_layernorm": ones(),
        "q_b_proj": torch.cat((sharp_HND, rope_HRD), 1).flatten(0, 1),
        "kv_a_proj_with_mqa": torch.cat((embedding, noise(ROPE, 2 * hidden, 0.3))),
        "kv_a_layernorm": ones(),
        "kv_b_proj": torch.cat((sharp_HND, part_HVD), 1).flatten(0, 1),
        "o_proj": torch.eye(hidden) + noise(hidden, hidden, 0.05),
    }
    return {f"midlayer.self_attn.{name}.weight": tensor for name, tensor in tensors.items()}


def apart(x_HTE: Tensor) -> Tensor:
    """Pairs of neighbours as pairs of both halves."""
    return torch.cat((x_HTE[..., ::2], x_HTE[..., 1::2]), -1)


def turned(x_HTE: Tensor, first: int = 0) -> Tensor:
    """RoPE of tokens from position `first` on."""
    width = x_HTE.shape[-1]
    frequencies = _BASE ** (-torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(first, first + x_HTE.shape[1]), frequencies)
    one, two = x_HTE.chunk(2, -1)
    return torch.cat((one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()), -1)
