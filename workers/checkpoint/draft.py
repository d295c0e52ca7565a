"""Describes the checkpoint of `--draft-model`."""

from pathlib import Path

from atom.shared.config.checkpoint import Checkpoint
from workers.checkpoint.hf_config import read_config
from workers.checkpoint.hf_directory import normalised_config, positions


def draft_checkpoint(path: str) -> Checkpoint:
    """The checkpoint of a directory, as far as a model is built from it. Raises ValueError."""
    directory = Path(path).expanduser().resolve()
    if not (directory / "config.json").is_file():
        raise ValueError(f"--draft-model {path}: give a directory with config.json and safetensors files")
    config = normalised_config(read_config(directory, {}), directory)
    return Checkpoint(
        directory=str(directory),
        architecture=config["architectures"][0],
        model_type=config["model_type"],
        hf_config=config,
        dtype=config["dtype"],
        vocab_size=config["vocab_size"],
        max_model_len=positions(config),
    )
