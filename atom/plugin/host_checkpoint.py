"""A host's model configuration as ATOM's checkpoint."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.online_quantization import OnlineQuantization, online_quantization
from workers.checkpoint.hf_config import with_new_names
from workers.checkpoint.hf_directory import normalised_config, positions

ONLINE = "online_quant_config"
_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def host_checkpoint(
    directory: str, settings: Mapping[str, Any], architectures: Sequence[str], dtype: torch.dtype
) -> Checkpoint:
    """The checkpoint in `directory`, whose config.json a host has read as `settings`.

    Raises ValueError for what is not supported.
    """
    renamed = with_new_names(dict(settings))
    renamed["dtype"] = _DTYPES[dtype]
    renamed["architectures"] = list(architectures)
    config = normalised_config(renamed, Path(directory))
    return Checkpoint(
        directory=directory,
        architecture=config["architectures"][0],
        model_type=config["model_type"],
        hf_config=config,
        dtype=config["dtype"],
        vocab_size=config["vocab_size"],
        max_model_len=positions(config),
    )


def online_quantization_of(settings: Mapping[str, Any], flag: str) -> OnlineQuantization | None:
    """What a host's flag for its plugins says under online_quant_config.

    Raises ValueError for other settings.
    """
    given = dict(settings)
    online = given.pop(ONLINE, None)
    if given:
        raise ValueError(f"{flag}: ATOM knows {ONLINE}, not {', '.join(sorted(given))}")
    return online_quantization(online if isinstance(online, str) or online is None else json.dumps(online))
