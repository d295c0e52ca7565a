"""A tiny model with a DSpark drafter, and its drafts by definition.

The Markov head nearly gives the logits that the model would have without its layers, so that many drafts are
right, at any place in a block. The decoder adds enough to change some of them.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.helpers.checkpoints.dflash_models import DflashModel, save_dflash_model
from tests.helpers.checkpoints.tiny_models import Tiny

_ADDED = 0.3
"""Size of the decoder's logits, compared with the model's."""


class DsparkModel(DflashModel):
    """A saved model and its drafter."""

    def drafts_of(self, ids: list[int], count: int, most: int) -> list[int]:
        """The greedy drafts after these ids, of which there are `most` except near the limit of a request.

        A block is as wide as the drafts are many, and ends at the last id of which the model reads more.
        """
        block_BD = self.block(ids, min(count + 1, most))[:count]
        head = self.tensors.get("lm_head.weight", self.built.lm_head.weight)
        drafts: list[int] = []
        for logits_V in block_BD @ head.T:
            before_E = self.tensors["markov_head.markov_w1.weight"][(ids + drafts)[-1]]
            logits_V = logits_V + self.tensors["markov_head.markov_w2.weight"] @ before_E
            drafts.append(int(logits_V.argmax()))
        return drafts


def save_dspark_model(model: Tiny, directory: Path, drafter: Path, copies: bool = True) -> DsparkModel:
    """Saves the row of the table, and a drafter for it.

    `copies`: as DeepSeek saves them, with embedding and LM head, and all fields at the top level; otherwise
    as SpecForge does.
    """
    saved = save_dflash_model(model, directory, drafter)
    built: Any = saved.built
    embedding, head = (part.weight.detach().clone() for part in (built.model.embed_tokens, built.lm_head))
    normed = embedding * (embedding.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    tensors = saved.tensors | {
        "norm.weight": _ADDED * saved.tensors["norm.weight"],
        "markov_head.markov_w1.weight": normed * built.model.norm.weight.detach(),
        "markov_head.markov_w2.weight": head.clone(),
        "confidence_head.proj.weight": torch.zeros(1, 2 * embedding.shape[1]),
        "confidence_head.proj.bias": torch.zeros(1),
    }
    fields = {
        "block_size": 7,
        "markov_rank": embedding.shape[1],
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        **saved.config["dflash_config"],
    }
    config = {
        name: value for name, value in saved.config.items() if name not in ("block_size", "dflash_config")
    }
    if copies:
        tensors |= {"embed_tokens.weight": embedding, "lm_head.weight": head}
        config |= {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512, **fields}
    else:
        config |= {
            "architectures": ["DSparkDraftModel"],
            "dflash_config": {"projector_type": "dspark", **fields},
        }
    save_file(tensors, drafter / "model.safetensors", metadata={"format": "pt"})
    (drafter / "config.json").write_text(json.dumps(config))
    return DsparkModel(**{**vars(saved), "tensors": tensors, "config": config})
