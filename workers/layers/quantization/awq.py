"""The method awq: INT4 in the order of AutoAWQ's GEMM kernels."""

from collections.abc import Mapping
from typing import Any

from workers.layers.quantization import int4
from workers.layers.quantization.rules import Rules, excluded, one_of, substring

_NAMES = {"bits": "w_bit", "group_size": "q_group_size"}
"""Two names of the same setting."""


def rules(stated: Mapping[str, Any]) -> Rules:
    """Everything, but for modules whose path has one of modules_to_not_convert in it."""
    settings = {name: _setting(stated, name, other) for name, other in _NAMES.items()}
    one_of(settings, "bits", (4,), 4)
    one_of(stated, "version", ("gemm", "GEMM"), "gemm")
    group = int4.group_of(128 if settings["group_size"] is None else settings["group_size"])
    scheme = int4.awq(group, one_of(stated, "zero_point", (True, False), True))
    return Rules(scheme, excluded(stated, ("modules_to_not_convert",), substring))


def _setting(stated: Mapping[str, Any], name: str, other: str) -> Any:
    found = [stated[each] for each in (name, other) if stated.get(each) is not None]
    if len(found) == 2 and found[0] != found[1]:
        raise ValueError(f"{name} {found[0]!r:.20} and {other} {found[1]!r:.20}, which are the same setting")
    return found[0] if found else None
