"""Settings that users of ATOM know by name and that this engine does not have (yet).

They are refused in one line with the reason, unless the value asks for nothing.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """`neutral` is the text of the value that asks for nothing; None where there is none."""

    reason: str
    neutral: str | None = None
    short: str | None = None


_NO_SPECULATION = "speculative decoding is not supported yet"

REFUSED: dict[str, Refusal] = {
    "data_parallel_size": Refusal(
        "data parallelism is not supported yet; start one server for each replica", "1", "-dp"
    ),
    "pipeline_parallel_size": Refusal("pipeline parallelism is not supported yet; use -tp", "1", "-pp"),
    "enable_expert_parallel": Refusal("expert parallelism is not supported yet; use -tp", "False"),
    "enable_dp_attention": Refusal("data parallel attention is not supported yet", "False"),
    "level": Refusal("compilation is not supported yet; only level 0 runs", "0"),
    "method": Refusal(_NO_SPECULATION),
    "num_speculative_tokens": Refusal(_NO_SPECULATION, "0"),
    "draft_model": Refusal(_NO_SPECULATION),
    "kv_transfer_config": Refusal("prefill and decode on separate servers are not supported yet", "{}"),
    "enable_chunked_prefill": Refusal(
        "prompts are always computed in chunks; it cannot be turned off", "True"
    ),
}


def refusal(name: str, value: object) -> str | None:
    """Why `name` cannot have `value`; None when the value asks for nothing. KeyError if unknown."""
    entry = REFUSED[name]
    if value is None or str(value) == entry.neutral:
        return None
    return entry.reason
