"""The method gptq: INT4 packed along inputs, with or without activation order.

`dynamic` gives modules settings of their own, by regular expressions in order: "-:…" leaves a module
plain, "+:…" or none of the two overrides settings.
"""

from collections.abc import Mapping
from typing import Any

from workers.layers.quantization import int4
from workers.layers.quantization.rules import (
    Rule,
    Rules,
    check_regex,
    excluded,
    one_of,
    regex,
    section,
    substring,
)
from workers.layers.quantization.scheme import PLAIN, Scheme

_LAYERS = "modules_in_block_to_quantize"
_OVERRIDES = ("bits", "group_size", "sym", "desc_act", "damp_percent", "static_groups", "mse")


def rules(stated: Mapping[str, Any]) -> Rules:
    """What `dynamic` says, then the modules that are quantized: all, or those of a list."""
    if one_of(stated, "lm_head", (True, False), False):
        raise ValueError("a quantized lm_head")
    scheme = _scheme(stated)
    named = [*_dynamic(stated), *excluded(stated, ("modules_to_not_convert",), substring)]
    listed = _listed(stated)
    if not listed:
        return Rules(scheme, tuple(named))
    return Rules(PLAIN, (*named, *(Rule(name, scheme, substring) for name in listed)))


def _scheme(settings: Mapping[str, Any]) -> Scheme:
    one_of(settings, "bits", (4,), 4)
    one_of(settings, "is_marlin_format", (False,), False)
    one_of(settings, "sym", (True, False), True)
    act_order = one_of(settings, "desc_act", (True, False), False)
    format = one_of(settings, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    size = settings.get("group_size")
    return int4.gptq(int4.group_of(128 if size is None else size), format == "gptq", act_order)


def _dynamic(stated: Mapping[str, Any]) -> list[Rule]:
    found = []
    for pattern, settings in section(stated, "dynamic").items():
        expression = pattern.removeprefix("+:").removeprefix("-:")
        check_regex(expression)
        if pattern.startswith("-:"):
            found.append(Rule(expression, PLAIN, regex))
            continue
        if not isinstance(settings, Mapping) or not set(settings) <= set(_OVERRIDES):
            raise ValueError(f"dynamic settings {settings!r:.60} of {pattern!r:.40}")
        found.append(Rule(expression, _scheme({**stated, **settings}), regex))
    return found


def _listed(stated: Mapping[str, Any]) -> list[str]:
    """Names in modules_in_block_to_quantize, a list of lists of them or of names."""
    given = stated.get(_LAYERS) or []
    if isinstance(given, list):
        names = [name for part in given for name in (part if isinstance(part, list) else [part])]
        if all(isinstance(name, str) and name for name in names):
            return names
    raise ValueError(f"{_LAYERS} that is not a list of module names: {given!r:.80}")
