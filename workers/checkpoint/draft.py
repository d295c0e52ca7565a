"""Reads the checkpoint of `--draft-model`, and checks that it can draft for the target model."""

from itertools import chain
from pathlib import Path

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.speculative import SpeculativeConfig
from workers.checkpoint.checkpoint_files import check_weights, tensors_by_file
from workers.checkpoint.draft_configs import (
    LATENT_EAGLE3,
    LLAMA,
    SPECULATORS_EAGLE3,
    Target,
    check_embedding,
    check_fit,
    check_vocabulary,
    with_layer_fields,
)
from workers.checkpoint.families import architectures, has_aux_hidden_states
from workers.checkpoint.hf_config import read_config, with_new_names
from workers.checkpoint.hf_directory import normalised_config, positions

_READERS = {
    "eagle3": (
        "LlamaForCausalLMEagle3",
        "Eagle3LlamaForCausalLM",
        *LATENT_EAGLE3,
        *SPECULATORS_EAGLE3,
    ),
    "dflash": ("DFlashDraftModel",),
    "dspark": ("Qwen3DSparkModel", "DSparkDraftModel"),
}
"""By method: the architectures of drafters that read the target's hidden states."""


def draft_checkpoint(
    speculative: SpeculativeConfig, target: Checkpoint, load_dummy: bool = False
) -> Checkpoint | None:
    """The checkpoint of the drafter, as far as a model is built from it; None for a method without one.

    With `load_dummy` it needs no weights. Raises ValueError, in one line, for one that cannot draft for
    `target`, and OSError.
    """
    path, method = speculative.draft_model, speculative.method
    if path is None or method is None or not speculative.has_draft_model:
        return None
    try:
        draft = _read(Path(path).expanduser().resolve())
        if method in _READERS:
            _check_reader(method, draft, target, speculative.num_speculative_tokens)
        else:
            _check_model(draft)
        if draft.vocab_size != target.vocab_size:
            raise ValueError(
                f"it has a vocabulary of {draft.vocab_size} ids, and the model one of {target.vocab_size}: a "
                "draft model needs the same tokenizer"
            )
        files = dict[Path, list[str]]()
        if not load_dummy:
            check_weights(Path(draft.directory))
            files = tensors_by_file(Path(draft.directory))
        names = {*chain.from_iterable(files.values())}
        if method in ("eagle3", "dflash"):
            check_embedding(draft.hf_config, target.hf_config, names, uses_head=method == "dflash")
        if method == "dflash" and not load_dummy:
            check_vocabulary(draft.hf_config, names)
    except ValueError as error:
        raise ValueError(f"--draft-model {path}: {error}") from None
    return draft


def _read(directory: Path) -> Checkpoint:
    if not (directory / "config.json").is_file():
        raise ValueError("give a directory with config.json and safetensors files, or a name on the hub")
    config = read_config(directory, {})
    if config["architectures"][0] in SPECULATORS_EAGLE3:
        config = with_new_names(with_layer_fields(config))
    config = normalised_config(config, directory)
    return Checkpoint(
        directory=str(directory),
        architecture=config["architectures"][0],
        model_type=config["model_type"],
        hf_config=config,
        dtype=config["dtype"],
        vocab_size=config["vocab_size"],
        max_model_len=positions(config),
    )


def _check_reader(method: str, draft: Checkpoint, target: Checkpoint, drafts: int) -> None:
    """Raise ValueError for a drafter of another method or another target, or a target that none fits."""
    is_first_form = (
        method == "eagle3" and draft.architecture == LLAMA and "draft_vocab_size" in draft.hf_config
    )
    if draft.architecture not in _READERS[method] and not is_first_form:
        raise ValueError(
            f"it has architecture {draft.architecture}; --method {method} supports "
            f"{' and '.join(_READERS[method])}"
        )
    if not has_aux_hidden_states(target.model_type):
        raise ValueError(
            f"--method {method} needs hidden states of the model, which {target.model_type} does not hand "
            "out; use another method"
        )
    sizes = Target(target.hf_config["hidden_size"], target.hf_config["num_hidden_layers"], drafts)
    check_fit(method, draft.hf_config, sizes)


def _check_model(draft: Checkpoint) -> None:
    """Raise ValueError for a whole model that cannot run as a drafter."""
    if draft.architecture not in architectures().get(draft.model_type, ()):
        reader = next((method for method, names in _READERS.items() if draft.architecture in names), None)
        hint = f"use --method {reader}" if reader else "docs/use/models.md lists the supported ones"
        raise ValueError(
            f"architecture {draft.architecture} of model type {draft.model_type} is not supported by "
            f"--method draft_model: {hint}"
        )
