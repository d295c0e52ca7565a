"""Figures of speculative decoding, from the engine core's counters."""

from itertools import pairwise
from typing import Any

from atom.shared.messages.engine import CoreStats

__all__ = ["mtp_statistics", "mtp_text"]


def mtp_statistics(stats: CoreStats) -> dict[str, Any]:
    """The figures of all steps that verified draft tokens, since the engine started.

    enabled                     whether the engine was started with a method
    total_draft_tokens          verified draft tokens
    total_accepted_tokens       those of them that the model sampled itself
    acceptance_rate             accepted of all draft tokens; 0 without any
    average_tokens_per_forward  sampled tokens of a sequence in such a step, at least 1
    distribution                by number of accepted tokens, how often a draft had so many
    """
    per_pos = stats.num_accepted_tokens_per_pos
    accepted = sum(per_pos)
    drafted = stats.num_draft_tokens
    at_least = [stats.num_drafts, *per_pos, 0]
    return {
        "enabled": bool(per_pos),
        "total_draft_tokens": drafted,
        "total_accepted_tokens": accepted,
        "acceptance_rate": accepted / drafted if drafted else 0.0,
        "average_tokens_per_forward": 1 + accepted / stats.num_drafts if stats.num_drafts else 1.0,
        "distribution": {count: more - fewer for count, (more, fewer) in enumerate(pairwise(at_least))},
    }


def mtp_text(statistics: dict[str, Any]) -> str:
    """`mtp_statistics` in a few lines."""
    if not statistics["enabled"]:
        return "speculative decoding is off: start with method and num_speculative_tokens"
    drafts = sum(statistics["distribution"].values())
    lines = [
        f"draft tokens                {statistics['total_draft_tokens']}",
        f"accepted tokens             {statistics['total_accepted_tokens']} "
        f"({statistics['acceptance_rate']:.1%})",
        f"tokens per forward          {statistics['average_tokens_per_forward']:.2f}",
    ]
    lines += [
        f"drafts with {count:>2} accepted     {number} ({number / drafts if drafts else 0.0:.1%})"
        for count, number in statistics["distribution"].items()
    ]
    return "\n".join(lines)
