"""Whether the settings of drafts fit each other and the checkpoint, and what they become for it."""

from dataclasses import replace

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.device import COMPILERS
from atom.shared.config.fields import ConfigError
from atom.shared.config.speculative import SpeculativeConfig

__all__ = ["check_drafting", "resolve_speculative"]

_LOOKUP_FLAGS = ("prompt_lookup_max", "prompt_lookup_min")
_FORCED_FLAGS = ("spec_decode_acceptance_length", "spec_decode_acceptance_rate")
_DRAFT_FLAGS = ("num_speculative_tokens", "draft_model", *_LOOKUP_FLAGS)
_MOST_OF_MODEL = 8
_MOST_OF_BLOCK = 31
_NGRAM = 5


def resolve_speculative(
    speculative: SpeculativeConfig, checkpoint: Checkpoint, notes: list[str]
) -> SpeculativeConfig:
    """The settings as they act; adds what the user should know to `notes`.

    Raises ConfigError for settings that contradict each other, or that the checkpoint cannot follow.
    """
    if speculative.method is None:
        _check_unused(speculative)
        return speculative
    _check_flags(speculative)
    _check_forced(speculative)
    if speculative.runs_model:
        _check_draft_model(speculative, checkpoint)
    notes += _forced_notes(speculative)
    return _with_lookup_lengths(speculative) if speculative.method == "ngram" else speculative


def check_drafting(speculative: SpeculativeConfig, level: int) -> None:
    """Raise ConfigError for a method that cannot run at the --level."""
    if speculative.reads_hidden_states and level in COMPILERS:
        raise ConfigError(
            f"--method {speculative.method} with --level {level} is not supported; use --level 0"
        )


def _check_unused(speculative: SpeculativeConfig) -> None:
    """Without a method, no other setting of drafts acts."""
    given = [name for name in _DRAFT_FLAGS if getattr(speculative, name)]
    given += [name for name in _FORCED_FLAGS if getattr(speculative, name) is not None]
    if not speculative.spec_decode_adaptive:
        given.append("no_spec_decode_adaptive")
    if given:
        raise ConfigError(f"--{given[0].replace('_', '-')} needs --method")


def _check_flags(speculative: SpeculativeConfig) -> None:
    method = speculative.method
    if speculative.num_speculative_tokens == 0:
        raise ConfigError(f"--method {method} needs --num-speculative-tokens of at least 1")
    if speculative.draft_model is not None and not speculative.has_draft_model:
        raise ConfigError(f"--draft-model: --method {method} has none; omit the flag")
    lookup = [name for name in _LOOKUP_FLAGS if getattr(speculative, name)]
    if lookup and method != "ngram":
        flag = f"--{lookup[0].replace('_', '-')}"
        raise ConfigError(f"{flag} is for --method ngram; omit it with --method {method}")


def _with_lookup_lengths(speculative: SpeculativeConfig) -> SpeculativeConfig:
    longest = speculative.prompt_lookup_max or speculative.prompt_lookup_min or _NGRAM
    shortest = speculative.prompt_lookup_min or longest
    if shortest > longest:
        raise ConfigError(f"--prompt-lookup-min {shortest} is greater than --prompt-lookup-max {longest}")
    return replace(speculative, prompt_lookup_max=longest, prompt_lookup_min=shortest)


def _check_forced(speculative: SpeculativeConfig) -> None:
    length = speculative.spec_decode_acceptance_length
    most = 1 + speculative.num_speculative_tokens
    if length is not None and speculative.spec_decode_acceptance_rate is not None:
        raise ConfigError(
            "--spec-decode-acceptance-length and --spec-decode-acceptance-rate say the same: omit one of them"
        )
    if length is not None and length > most:
        raise ConfigError(
            f"--spec-decode-acceptance-length {length:g}: a step has at most {most} tokens with "
            f"--num-speculative-tokens {most - 1}"
        )


def _forced_notes(speculative: SpeculativeConfig) -> list[str]:
    length = speculative.forced_length
    if length is None:
        return []
    return [
        f"drafts are accepted without verification, {length:g} tokens a step on average: the text is not the "
        "model's, and the figures are those of a benchmark"
    ]


def _check_draft_model(speculative: SpeculativeConfig, checkpoint: Checkpoint) -> None:
    flag = f"--method {speculative.method}"
    if speculative.has_draft_model and speculative.draft_model is None:
        raise ConfigError(f"{flag} needs --draft-model")
    most = _MOST_OF_BLOCK if speculative.drafts_blocks else _MOST_OF_MODEL
    if speculative.num_speculative_tokens > most:
        raise ConfigError(f"{flag} drafts at most {most} tokens: lower --num-speculative-tokens")
    if speculative.method == "mtp" and checkpoint.mtp_layers != 1:
        raise ConfigError(
            f"{flag}: one layer for multi-token prediction is supported, for some families; this checkpoint "
            f"({checkpoint.model_type}) has {checkpoint.mtp_layers} that can be used; use --method ngram"
        )
