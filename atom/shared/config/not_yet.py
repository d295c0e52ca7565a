"""Known settings that are not supported.

They are refused with the reason, except for the value that changes nothing (`neutral`).
"""

from dataclasses import dataclass

from atom.shared.config.fields import parse_switch


@dataclass(frozen=True)
class Refusal:
    """`neutral` is the text of the accepted value; None if every value is refused."""

    reason: str
    neutral: str | None = None
    short: str | None = None


REFUSED: dict[str, Refusal] = {
    "pipeline_parallel_size": Refusal("pipeline parallelism is not supported yet; use -tp", "1", "-pp"),
    "prefill_context_parallel_size": Refusal(
        "prefill context parallelism is not supported yet; -dcp splits the KV cache of MLA", "1", "-pcp"
    ),
    "cp_kv_cache_interleave_size": Refusal("ranks take turns token by token; use 1", "1"),
    "enable_tbo": Refusal(
        "large steps are computed in parts without a flag, where that hides their all-reduces; leave it out",
        "False",
    ),
    "enable_ssl_refresh": Refusal("renewed certificates are always used", "True"),
    "enable_chunked_prefill": Refusal("chunked prefill is always on", "True"),
}


def refusal(name: str, value: object) -> str | None:
    """The reason for refusing `value`; None if it is neutral.

    Raises KeyError for an unknown name, ConfigError for a text that is no value of a switch.
    """
    entry = REFUSED[name]
    if isinstance(value, str) and entry.neutral == "True":
        value = parse_switch(value)
    if value is None or str(value) == entry.neutral:
        return None
    return entry.reason
