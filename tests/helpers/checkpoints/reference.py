"""transformers' outputs of a tiny model, computed once for all of its tests.

Comparing outputs means something only if they are distinct: `problems` lists why those of a row are not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.helpers.checkpoints.tiny_models import Greedy, Tiny, build_tiny, hf_greedy, hf_logits, prompt_of
from workers.checkpoint.families import keeps_states

NEW_TOKENS = 32
PROMPT_LENGTHS = (5, 37, 64)
"""The middle one ends within a block, the last one at a block boundary; all continue into further blocks."""
PROMPTS = [prompt_of(length, length) for length in PROMPT_LENGTHS]
MAX_TOKENS = max(PROMPT_LENGTHS) + NEW_TOKENS

MIN_DISTINCT = 16
MIN_MARGIN = 1e-3
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Continuation:
    """A prompt and its greedy continuation."""

    prompt: list[int]
    greedy: Greedy
    logprobs_TV: torch.Tensor
    """Row t: log probabilities of the token after token t of `text`."""

    @property
    def text(self) -> list[int]:
        return self.prompt + self.greedy.ids


@dataclass(frozen=True)
class Reference:
    """One row of the table: its checkpoint, and transformers' outputs."""

    directory: Path
    continuations: list[Continuation]
    windows: list[int | None]
    """Sliding window of each layer; None: full attention."""
    keeps_states: bool
    """Whether the family has recurrent states, for which there is no prefix cache."""

    @property
    def prompts(self) -> list[list[int]]:
        return [continuation.prompt for continuation in self.continuations]

    @property
    def ids(self) -> list[list[int]]:
        return [continuation.greedy.ids for continuation in self.continuations]


ReferenceOf = Callable[[str], Reference]
"""By the name of a row."""


def make_reference(model: Tiny, directory: Path) -> Reference:
    """Saves the row in `directory`. Raises AssertionError for one with `problems`."""
    built = build_tiny(model)
    built.save_pretrained(directory)
    greedy = _greedy(built)
    why = problems(greedy, windows(built.config))
    assert not why, (
        f"{model.name} has indistinct outputs: {'; '.join(why)} (python -m tests.models.find_seed)"
    )
    continuations = list(map(partial(_continuation, built), PROMPTS, greedy))
    return Reference(directory, continuations, windows(built.config), keeps_states(model.model_type))


def _greedy(model: torch.nn.Module) -> list[Greedy]:
    return [hf_greedy(model, prompt, NEW_TOKENS, MIN_MARGIN) for prompt in PROMPTS]


def _continuation(model: torch.nn.Module, prompt: list[int], greedy: Greedy) -> Continuation:
    return Continuation(prompt, greedy, hf_logits(model, prompt + greedy.ids).log_softmax(-1))


def windows(config: Any) -> list[int | None]:
    """Sliding window or chunk of each layer, as transformers reads this configuration."""
    width = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    everywhere = "sliding_attention" if width else "full_attention"
    kinds = getattr(config, "layer_types", None) or [everywhere] * config.num_hidden_layers
    return [width if kind in ("sliding_attention", "chunked_attention") else None for kind in kinds]


def problems(continuations: list[Greedy], widths: list[int | None]) -> list[str]:
    """Why comparing these outputs would prove little; empty for a good row."""
    distinct = min(len(set(greedy.ids)) for greedy in continuations)
    margin = min(greedy.smallest_margin for greedy in continuations)
    checks = {
        f"the top-2 margin is {margin:.1e}, no more than {MIN_MARGIN:.0e}": margin > MIN_MARGIN,
        f"{distinct} distinct ids of {NEW_TOKENS}, fewer than {MIN_DISTINCT}": distinct >= MIN_DISTINCT,
    }
    for width in filter(None, widths):
        crosses = any(0 <= width - length < NEW_TOKENS - 1 for length in PROMPT_LENGTHS)
        checks[f"no output crosses the edge of a window of {width} tokens"] = crosses
    return [problem for problem, fine in checks.items() if not fine]


def problems_of(model: Tiny) -> list[str]:
    """`problems` of any row."""
    built = build_tiny(model)
    return problems(_greedy(built), windows(built.config))
