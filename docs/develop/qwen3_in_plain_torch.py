"""Qwen3 in plain torch: the model before its fusions, its KV cache and its ranks.

One sequence at a time. `weights` are the checkpoint's tensors by name, `config` is its config.json.
`workers/layers/decoder/__init__.py` says which of our modules takes over which lines.

T tokens, D hidden, H query heads, K key and value heads, E features of a head, F of the MLP, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

Weights = Mapping[str, Tensor]
Config = Mapping[str, Any]


def logits(ids_T: Tensor, weights: Weights, config: Config) -> Tensor:
    """Logits [T, V] for the token after each of the ids (int64)."""
    x_TD = weights["model.embed_tokens.weight"][ids_T]
    cos_TE, sin_TE = rotation(len(ids_T), config)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        own = {name.removeprefix(prefix): weights[name] for name in weights if name.startswith(prefix)}
        normed_TD = rms_norm(x_TD, own["input_layernorm.weight"], config)
        x_TD = x_TD + self_attention(normed_TD, cos_TE, sin_TE, own, config)
        normed_TD = rms_norm(x_TD, own["post_attention_layernorm.weight"], config)
        x_TD = x_TD + mlp(normed_TD, own)
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return rms_norm(x_TD, weights["model.norm.weight"], config) @ weights[head].T


def rms_norm(x: Tensor, weight: Tensor, config: Config) -> Tensor:
    """Over the last dimension."""
    return x * (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt() * weight


def self_attention(x_TD: Tensor, cos_TE: Tensor, sin_TE: Tensor, own: Weights, config: Config) -> Tensor:
    """Causal grouped-query attention: H / K query heads share a head of keys and values."""
    q_THE, k_TKE, v_TKE = (
        (x_TD @ own[f"self_attn.{name}_proj.weight"].T).unflatten(1, (-1, config["head_dim"]))
        for name in "qkv"
    )
    q_THE = rotary(rms_norm(q_THE, own["self_attn.q_norm.weight"], config), cos_TE, sin_TE)
    k_TKE = rotary(rms_norm(k_TKE, own["self_attn.k_norm.weight"], config), cos_TE, sin_TE)
    shared = q_THE.shape[1] // k_TKE.shape[1]
    k_THE = k_TKE.repeat_interleave(shared, 1)
    v_THE = v_TKE.repeat_interleave(shared, 1)
    scores_HTT = torch.einsum("qhe,khe->hqk", q_THE, k_THE) * config["head_dim"] ** -0.5
    later_TT = torch.ones(len(x_TD), len(x_TD)).triu(1).bool()
    attention_HTT = scores_HTT.masked_fill(later_TT, -torch.inf).softmax(-1)
    out_THE = torch.einsum("hqk,khe->qhe", attention_HTT, v_THE)
    return out_THE.flatten(1) @ own["self_attn.o_proj.weight"].T


def rotation(tokens: int, config: Config) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, E] of RoPE. Features i and i + E / 2 are a pair and rotate by the same angle."""
    exponents = torch.arange(0, config["head_dim"], 2) / config["head_dim"]
    frequencies = config["rope_parameters"]["rope_theta"] ** -exponents
    angles_TE = torch.outer(torch.arange(tokens), frequencies).repeat(1, 2)
    return angles_TE.cos(), angles_TE.sin()


def rotary(x_TNE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """RoPE on N heads."""
    first, second = x_TNE.chunk(2, -1)
    return x_TNE * cos_TE[:, None] + torch.cat((-second, first), -1) * sin_TE[:, None]


def mlp(x_TD: Tensor, own: Weights) -> Tensor:
    """SwiGLU: F gated features."""
    gate_TF = x_TD @ own["mlp.gate_proj.weight"].T
    up_TF = x_TD @ own["mlp.up_proj.weight"].T
    return (silu(gate_TF) * up_TF) @ own["mlp.down_proj.weight"].T
