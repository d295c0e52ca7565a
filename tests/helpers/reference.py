"""What transformers says of a tiny model, made once for all tests of it.

A row of the table of models proves something only if its tokens differ clearly: `problems` says
why one does not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.helpers.tiny_models import Greedy, Tiny, build_tiny, hf_greedy, hf_logits, prompt_of
from workers.families import keeps_states

NEW_TOKENS = 32
PROMPT_LENGTHS = (5, 37, 64)
"""The middle one ends inside a block, the last one at a border; all go on across some."""
PROMPTS = [prompt_of(length, length) for length in PROMPT_LENGTHS]
MOST_TOKENS = max(PROMPT_LENGTHS) + NEW_TOKENS

LEAST_DISTINCT = 16
LEAST_GAP = 1e-3
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Answer:
    """A prompt and its greedy continuation."""

    prompt: list[int]
    greedy: Greedy
    logprobs_TV: torch.Tensor
    """Row t: log probabilities of the token behind token t of `text`."""

    @property
    def text(self) -> list[int]:
        return self.prompt + self.greedy.ids


@dataclass(frozen=True)
class Reference:
    """One row of the table: its checkpoint, and transformers' answers."""

    directory: Path
    answers: list[Answer]
    windows: list[int | None]
    """The tokens that each layer sees; None for all."""
    keeps_states: bool
    """Then nothing is ever found in a prefix cache."""

    @property
    def prompts(self) -> list[list[int]]:
        return [answer.prompt for answer in self.answers]

    @property
    def ids(self) -> list[list[int]]:
        return [answer.greedy.ids for answer in self.answers]


ReferenceOf = Callable[[str], Reference]
"""By the name of a row."""


def make_reference(model: Tiny, directory: Path) -> Reference:
    """Saves the row in `directory`. AssertionError for one that would prove little."""
    built = build_tiny(model)
    built.save_pretrained(directory)
    greedy = _greedy(built)
    why = problems(greedy, windows(built.config))
    assert not why, f"{model.name} proves little: {'; '.join(why)} (python -m tests.models.find_seed)"
    answers = list(map(partial(_answer, built), PROMPTS, greedy))
    return Reference(directory, answers, windows(built.config), keeps_states(model.model_type))


def _greedy(model: torch.nn.Module) -> list[Greedy]:
    return [hf_greedy(model, prompt, NEW_TOKENS, LEAST_GAP) for prompt in PROMPTS]


def _answer(model: torch.nn.Module, prompt: list[int], greedy: Greedy) -> Answer:
    return Answer(prompt, greedy, hf_logits(model, prompt + greedy.ids).log_softmax(-1))


def windows(config: Any) -> list[int | None]:
    """By layer, as transformers reads this configuration."""
    width = getattr(config, "sliding_window", None)
    everywhere = "sliding_attention" if width else "full_attention"
    kinds = getattr(config, "layer_types", None) or [everywhere] * config.num_hidden_layers
    return [width if kind == "sliding_attention" else None for kind in kinds]


def problems(answers: list[Greedy], widths: list[int | None]) -> list[str]:
    """Why comparing these answers would prove little; none for a good row."""
    distinct = min(len(set(greedy.ids)) for greedy in answers)
    gap = min(greedy.smallest_gap for greedy in answers)
    checks = {
        f"the best two logits differ by {gap:.1e}, no more than {LEAST_GAP:.0e}": gap > LEAST_GAP,
        f"{distinct} distinct ids of {NEW_TOKENS}, fewer than {LEAST_DISTINCT}": distinct >= LEAST_DISTINCT,
    }
    for width in filter(None, widths):
        crosses = any(0 <= width - length < NEW_TOKENS - 1 for length in PROMPT_LENGTHS)
        checks[f"no answer crosses the border of a window of {width} tokens"] = crosses
    return [problem for problem, fine in checks.items() if not fine]


def problems_of(model: Tiny) -> list[str]:
    """The same for any row."""
    built = build_tiny(model)
    return problems(_greedy(built), windows(built.config))
