"""Tiny models with a layer for multi-token prediction, and its drafts by definition.

The checkpoint has one more decoder layer than the model. Layers add little to the residual stream, and
eh_proj nearly passes the embedding on, so that the next token depends mostly on the last one and many drafts
are right.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from atom.shared.config.checkpoint import Checkpoint
from tests.helpers.checkpoints.tiny_models import Tiny, build_tiny, checkpoint_of, tiny
from tests.helpers.checkpoints.vision_models import Processed, build, image_inputs, save

DELTA_FAMILIES = ("qwen3-next", "qwen3.5", "qwen3.5-moe")
"""Those with recurrent layers."""
_SMALL = 0.015


@dataclass(frozen=True)
class MtpModel:
    """A saved model with its layer."""

    checkpoint: Checkpoint
    built: Any
    """transformers' model; its last layer is the one for multi-token prediction."""
    own: dict[str, Tensor]
    """The layer's tensors that no other layer has, by their names in it."""

    def drafts(self, ids: list[int], count: int) -> list[int]:
        """The greedy drafts after these ids."""
        hidden_TD = self._hidden(ids[:-1])
        next_ids = ids[1:]
        drafts: list[int] = []
        while len(drafts) < count:
            out_TD = self._layer(hidden_TD, next_ids)
            drafts.append(int((out_TD[-1] @ self.built.lm_head.weight.T).argmax()))
            hidden_TD = torch.cat((hidden_TD, out_TD[-1:]))
            next_ids = [*next_ids, drafts[-1]]
        return drafts

    def _hidden(self, ids: list[int]) -> Tensor:
        model = self.built.model
        layers = model.layers
        model.layers = layers[:-1]
        try:
            found: Tensor = model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        finally:
            model.layers = layers
        return found

    def _layer(self, hidden_TD: Tensor, next_ids: list[int]) -> Tensor:
        embedded_TD = self.built.model.embed_tokens(torch.tensor(next_ids))
        pair_T2D = torch.cat((self._norm("enorm", embedded_TD), self._norm("hnorm", hidden_TD)), -1)
        out_1TD = self._run(self.built.model.layers[-1], (pair_T2D @ self.own["eh_proj.weight"].T)[None])
        return self._norm("shared_head.norm", out_1TD[0])

    def _norm(self, name: str, x_TD: Tensor) -> Tensor:
        eps = self.built.config.rms_norm_eps
        return x_TD * (x_TD.square().mean(-1, keepdim=True) + eps).rsqrt() * self.own[f"{name}.weight"]

    def _run(self, layer: Any, x_1TD: Tensor) -> Tensor:
        tokens = x_1TD.shape[1]
        positions_1T = torch.arange(tokens)[None]
        mask_11TT = torch.full((tokens, tokens), -torch.inf).triu(1)[None, None]
        out = layer(
            x_1TD,
            attention_mask=mask_11TT,
            position_ids=positions_1T,
            position_embeddings=self.built.model.rotary_emb(x_1TD, positions_1T),
        )
        found: Tensor = out[0] if isinstance(out, tuple) else out
        return found


def save_mtp_model(model: Tiny, directory: Path) -> MtpModel:
    """Saves the row of the table, with one more layer, as published checkpoints name it."""
    layers = model.config.get("num_hidden_layers", 3)
    more: dict[str, Any] = {"num_hidden_layers": layers + 1}
    if model.model_type == "glm_moe_dsa":  # that layer has an indexer, whichever have none
        more["indexer_types"] = ["full"] * (layers - 1) + ["shared", "full"]
    built: Any = build_tiny(replace(model, config=model.config | more))
    hidden = built.config.hidden_size
    generator = torch.Generator().manual_seed(model.seed)
    passing_on_D2D = _passing_on(hidden, generator)
    with torch.no_grad():
        for name, weight in built.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.mul_(_SMALL)
    own = {
        "enorm.weight": 0.9 + 0.2 * torch.rand(hidden, generator=generator),
        "hnorm.weight": 0.9 + 0.2 * torch.rand(hidden, generator=generator),
        "eh_proj.weight": passing_on_D2D,
        "shared_head.norm.weight": built.model.norm.weight.detach().clone(),
    }
    built.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    tensors |= {f"model.layers.{layers}.{name}": tensor for name, tensor in own.items()}
    tensors[f"model.layers.{layers}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"model.layers.{layers}.shared_head.head.weight"] = built.lm_head.weight.detach().clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    if "indexer_types" in more:
        config["indexer_types"] = more["indexer_types"][:layers]
    (directory / "config.json").write_text(json.dumps(config))
    return MtpModel(checkpoint_of(directory), built, own)


@dataclass(frozen=True)
class DeltaMtpModel(MtpModel):
    """A model with recurrent layers; the one for multi-token prediction has full attention."""

    def _norm(self, name: str, x_TD: Tensor) -> Tensor:
        eps = self.built.config.rms_norm_eps
        return x_TD * (x_TD.square().mean(-1, keepdim=True) + eps).rsqrt() * (1 + self.own[f"{name}.weight"])


_DELTA_NAMES = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "eh_proj": "mtp.fc",
    "shared_head.norm": "mtp.norm",
}


def save_delta_mtp_model(model: Tiny, directory: Path) -> DeltaMtpModel:
    """Saves a row of the Qwen3-Next families, with one more layer, as published checkpoints name it."""
    layers = model.config["num_hidden_layers"]
    kinds = ["linear_attention" if (layer + 1) % 4 else "full_attention" for layer in range(layers)]
    more = {"num_hidden_layers": layers + 1, "layer_types": [*kinds, "full_attention"]}
    built: Any = build_tiny(replace(model, config=model.config | more))
    hidden = built.config.hidden_size
    generator = torch.Generator().manual_seed(model.seed)
    with torch.no_grad():
        for name, weight in built.named_parameters():
            if any(part in name for part in ("o_proj", "down_proj", "out_proj")):
                weight.mul_(_SMALL)
    own = {
        "enorm.weight": 0.2 * torch.rand(hidden, generator=generator) - 0.1,
        "hnorm.weight": 0.2 * torch.rand(hidden, generator=generator) - 0.1,
        "eh_proj.weight": _passing_on(hidden, generator),
        "shared_head.norm.weight": built.model.norm.weight.detach().clone(),
    }
    built.save_pretrained(directory)
    last = f"model.layers.{layers}."
    saved = load_file(directory / "model.safetensors")
    tensors = {name.replace(last, "mtp.layers.0."): tensor for name, tensor in saved.items()}
    for name, tensor in own.items():
        module = name.removesuffix(".weight")
        tensors[f"{_DELTA_NAMES[module]}.weight"] = tensor
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "layer_types": kinds, "mtp_num_hidden_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    return DeltaMtpModel(checkpoint_of(directory), built, own)


def save_mtp_model_of(name: str, directory: Path) -> MtpModel:
    """Saves the row of that name by the function for its family."""
    save: Callable[[Tiny, Path], MtpModel] = save_mtp_model
    if name in DELTA_FAMILIES:
        save = save_delta_mtp_model
    elif name == "deepseek-v4":
        save = save_streams_mtp_model
    return save(tiny(name), directory)


def _passing_on(hidden: int, generator: torch.Generator) -> Tensor:
    """A projection of pairs that nearly passes the embedding on."""
    noise_D2D = torch.randn(hidden, 2 * hidden, generator=generator) * 0.03 * (2 * hidden) ** -0.5
    return noise_D2D + torch.eye(hidden, 2 * hidden)


@dataclass(frozen=True)
class StreamsMtpModel(MtpModel):
    """DeepSeek-V4: the layer reads the model's streams, [T, N, D], before they are summed."""

    def drafts(self, ids: list[int], count: int) -> list[int]:
        streams_TND = self._streams(ids[:-1])
        next_ids = ids[1:]
        drafts: list[int] = []
        while len(drafts) < count:
            out_TND = self._predicted(streams_TND, next_ids)
            hidden_D = self._norm("norm", self._summed(out_TND[-1]))
            drafts.append(int((self.built.lm_head.weight @ hidden_D).argmax()))
            streams_TND = torch.cat((streams_TND, out_TND[-1:]))
            next_ids = [*next_ids, drafts[-1]]
        return drafts

    def _streams(self, ids: list[int]) -> Tensor:
        seen: list[Tensor] = []
        hook = self.built.model.hc_head.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
        try:
            self._hidden(ids)
        finally:
            hook.remove()
        return seen[0]

    def _predicted(self, streams_TND: Tensor, next_ids: list[int]) -> Tensor:
        model = self.built.model
        ids_1T = torch.tensor([next_ids])
        embedded_TD = self._norm("enorm", model.embed_tokens(ids_1T)[0]) @ self.own["e_proj.weight"].T
        x_TND = self._norm("hnorm", streams_TND) @ self.own["h_proj.weight"].T + embedded_TD[:, None]
        tokens = len(next_ids)
        positions_1T = torch.arange(tokens)[None]
        back_TT = positions_1T.T - positions_1T
        unseen_TT = (back_TT < 0) | (back_TT >= self.built.config.sliding_window)
        angles = {kind: model.rotary_emb(x_TND, positions_1T, kind) for kind in ("main", "compress")}
        found_1TND: Tensor = model.layers[-1](
            x_TND[None],
            input_ids=ids_1T,
            attention_mask=torch.zeros(1, 1, tokens, tokens).masked_fill(unseen_TT, -torch.inf),
            position_ids=positions_1T,
            position_embeddings=angles,
            past_key_values=None,
        )
        return found_1TND[0]

    def _summed(self, streams_ND: Tensor) -> Tensor:
        config = self.built.config
        flat = streams_ND.flatten()
        flat = flat * (flat.square().mean() + config.rms_norm_eps).rsqrt()
        weights_N = (self.own["hc_head_fn"] @ flat) * self.own["hc_head_scale"] + self.own["hc_head_base"]
        return (weights_N.sigmoid() + config.hc_eps) @ streams_ND


def save_streams_mtp_model(model: Tiny, directory: Path) -> StreamsMtpModel:
    """Saves a row of DeepSeek-V4, with one more layer, as published checkpoints name it."""
    layers = model.config["num_hidden_layers"]
    kinds = {"layer_types": "sliding_attention", "mlp_layer_types": "moe"}
    more = {name: [*model.config[name], kind] for name, kind in kinds.items()}
    built: Any = build_tiny(replace(model, config=model.config | more | {"num_hidden_layers": layers + 1}))
    hidden, streams = built.config.hidden_size, built.config.hc_mult
    generator = torch.Generator().manual_seed(model.seed)
    with torch.no_grad():
        for name, weight in built.named_parameters():
            if "o_b_proj" in name or "down_proj" in name:
                weight.mul_(_SMALL)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    own = {
        "enorm.weight": 0.9 + 0.2 * torch.rand(hidden, generator=generator),
        "hnorm.weight": 0.9 + 0.2 * torch.rand(hidden, generator=generator),
        "e_proj.weight": _passing_on(hidden, generator)[:, :hidden].clone(),
        "h_proj.weight": 0.03 * random(hidden, hidden) * hidden**-0.5,
        "norm.weight": built.model.norm.weight.detach().clone(),
        "hc_head_fn": random(streams, streams * hidden) * (streams * hidden) ** -0.5,
        "hc_head_base": random(streams),
        "hc_head_scale": 0.5 + torch.rand(1, generator=generator),
    }
    built.save_pretrained(directory)
    last = f"model.layers.{layers}."
    saved = load_file(directory / "model.safetensors")
    tensors = {name.replace(last, "mtp.0."): tensor for name, tensor in saved.items()}
    tensors |= {f"mtp.0.{name}": tensor for name, tensor in own.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    config |= {name: model.config[name] for name in kinds}
    (directory / "config.json").write_text(json.dumps(config))
    return StreamsMtpModel(checkpoint_of(directory), built, own)


@dataclass(frozen=True)
class VisionMtpModel:
    """A saved Qwen3.5 with a vision tower and a layer for multi-token prediction."""

    built: Any
    """transformers' model; its last layer is that one."""
    own: dict[str, Tensor]
    """The tensors mtp.* of no layer."""

    def drafts(self, ids: list[int], images: Sequence[Processed], count: int) -> list[int]:
        """The greedy drafts after these ids, whose placeholders stand for the images."""
        text = self.built.model.language_model
        inputs = image_inputs(self.built, ids, images)
        layers = text.layers
        text.layers = layers[:-1]
        try:
            outputs = self.built.model(**inputs, use_cache=False)
        finally:
            text.layers = layers
        positions_31T, _ = self.built.model.get_rope_index(
            inputs["input_ids"], inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"]
        )
        hidden_TD = outputs.last_hidden_state[0][:-1]
        found = self.built.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
        embedded_TD = text.embed_tokens(inputs["input_ids"])[0]
        embedded_TD[inputs["mm_token_type_ids"][0] == 1] = torch.cat(found.pooler_output)
        next_TD = embedded_TD[1:]
        positions_31T = positions_31T[:, :, :-1]
        drafts: list[int] = []
        while len(drafts) < count:
            out_TD = self._layer(hidden_TD, next_TD, positions_31T)
            drafts.append(int((out_TD[-1] @ self.built.lm_head.weight.T).argmax()))
            hidden_TD = torch.cat((hidden_TD, out_TD[-1:]))
            next_TD = torch.cat((next_TD, text.embed_tokens(torch.tensor(drafts[-1:]))))
            positions_31T = torch.cat((positions_31T, positions_31T[:, :, -1:] + 1), -1)
        return drafts

    def _layer(self, hidden_TD: Tensor, next_TD: Tensor, positions_31T: Tensor) -> Tensor:
        text = self.built.model.language_model
        pair_T2D = torch.cat(
            (self._norm("pre_fc_norm_embedding", next_TD), self._norm("pre_fc_norm_hidden", hidden_TD)), -1
        )
        x_1TD = (pair_T2D @ self.own["fc"].T)[None]
        tokens = x_1TD.shape[1]
        out_1TD = text.layers[-1](
            x_1TD,
            attention_mask=torch.full((tokens, tokens), -torch.inf).triu(1)[None, None],
            position_ids=positions_31T[0],
            position_embeddings=text.rotary_emb(x_1TD, positions_31T),
        )
        return self._norm("norm", (out_1TD[0] if isinstance(out_1TD, tuple) else out_1TD)[0])

    def _norm(self, name: str, x_TD: Tensor) -> Tensor:
        eps = self.built.config.text_config.rms_norm_eps
        return x_TD * (x_TD.square().mean(-1, keepdim=True) + eps).rsqrt() * (1 + self.own[name])


def save_vision_mtp_model(directory: Path, strong: bool = False) -> VisionMtpModel:
    """Saves such a model; `strong`: its drafts depend on all tokens, and few are right."""
    layers = 4
    kinds = ["linear_attention", "full_attention"] * 2
    built = build(
        "qwen3_5", text={"num_hidden_layers": layers + 1, "layer_types": [*kinds, "full_attention"]}
    )
    hidden = built.config.text_config.hidden_size
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in built.named_parameters():
            adds = any(part in name for part in ("o_proj", "down_proj", "out_proj"))
            if adds and "visual" not in name and not (strong and f".{layers}." in name):
                weight.mul_(_SMALL)
    save(built, directory)
    last = f"model.language_model.layers.{layers}."
    saved = load_file(directory / "model.safetensors")
    tensors = {name.replace(last, "mtp.layers.0."): tensor for name, tensor in saved.items()}
    own = {
        "pre_fc_norm_embedding": 0.2 * torch.rand(hidden, generator=generator) - 0.1,
        "pre_fc_norm_hidden": 0.2 * torch.rand(hidden, generator=generator) - 0.1,
        "fc": _passing_on(hidden, generator),
        "norm": built.model.language_model.norm.weight.detach().clone(),
    }
    tensors |= {f"mtp.{module}.weight": tensor for module, tensor in own.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["text_config"] |= {
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "mtp_num_hidden_layers": 1,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return VisionMtpModel(built, own)
