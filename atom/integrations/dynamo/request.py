"""Dynamo's requests as ours: every field is honoured here, by Dynamo's frontend, or refused by its name.

The frontend has applied the chat template and the tokenizer. From the ids of the output it makes text,
finds stop strings and tool calls, and drops the text of special tokens; so their fields are left to it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from atom.shared.sampling_params import SamplingParams, StructuredOutputsParams
from frontend.errors import RequestError
from frontend.text.constraint import Constraint, constraint_of

_FRONTENDS = frozenset(
    {
        *("model", "eos_token_ids", "mdc_sum", "annotations", "router_config_override", "migration_link"),
        *("kv_hint", "require_reasoning", "router", "agent_context", "request_timestamp_ms", "tracker"),
        *("jail_seed", "_HEALTH_CHECK", "batch_token_ids"),
    }
)
"""Fields that do not change what this engine generates."""
_EXTRA_ARGS = frozenset({"nvext"})
_ROUTING = frozenset(
    {
        *("backend_instance_id", "expected_output_tokens", "priority_jump", "strict_priority"),
        *("allowed_worker_ids", "routing_constraints", "policy_class"),
    }
)
"""Fields of `routing` that the router alone reads."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),  # a chunk that ends one choice would end them all
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "formatted_prompt": (False,),
    "backend": ("auto", "xgrammar"),
    "lora_name": ("",),
}
"""Fields with no other value than these; null is always accepted."""
_SAMPLING = {
    *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "top_k"),
}
_GUIDED = {"json": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}
_GUIDED |= {"structural_tag": "structural_tag"}


@dataclass(frozen=True)
class DynamoRequest:
    """A request for the engine."""

    prompt_ids: list[int]
    params: SamplingParams
    rank: int | None
    """The data-parallel rank that the router has chosen."""
    cache_salt: str = ""
    constraint: Constraint | None = None
    tokens_as_ids: bool = False
    """Name tokens in log probabilities `token_id:N`."""


def read_request(
    request: Mapping[str, Any], room: int, defaults: Mapping[str, float | int] = {}
) -> DynamoRequest:
    """Check a request; `room` tokens can be generated after its prompt where it sets no max_tokens.

    `defaults` are the checkpoint's own sampling parameters, for those that the request leaves out.

    Raises RequestError with the name of a field that is invalid, or set and not supported.
    """
    groups = {name: _group(request, name) for name in ("sampling_options", "stop_conditions")}
    output = _group(request, "output_options")
    routing = _group(request, "routing")
    _refuse_rest("", request, _FRONTENDS | {*groups, "output_options", "routing", "token_ids", "extra_args"})
    _refuse_rest("extra_args.", _group(request, "extra_args"), _EXTRA_ARGS)
    _refuse_rest("routing.", routing, _ROUTING | {"dp_rank", "cache_salt"})
    values, guided = _sampling(groups["sampling_options"])
    values = {**defaults, **values, **_stops(groups["stop_conditions"], room), **_outputs(output)}
    try:
        params = SamplingParams(**values)
        constraint = None if guided is None else constraint_of(guided, "guided_decoding")
    except (TypeError, ValueError) as error:
        raise RequestError(str(error)) from None
    return DynamoRequest(
        _typed(request, "token_ids", list[int]),
        params,
        _typed(routing, "dp_rank", int | None),
        _typed(routing, "cache_salt", str | None) or "",
        constraint,
        bool(output.get("return_tokens_as_token_ids")),
    )


def _sampling(given: Mapping[str, Any]) -> tuple[dict[str, Any], StructuredOutputsParams | None]:
    values = {name: given[name] for name in _SAMPLING if given.get(name) is not None}
    # The frontend keeps a stop string, or the text of a stop id, in the output.
    _refuse_rest("", given, _SAMPLING | {"guided_decoding", "include_stop_str_in_output"})
    return values, _structure(_group(given, "guided_decoding"))


def _structure(given: Mapping[str, Any]) -> StructuredOutputsParams | None:
    _refuse_rest("guided_decoding.", given, _GUIDED.keys())
    chosen = {ours: given[name] for name, ours in _GUIDED.items() if given.get(name) is not None}
    if not chosen:
        return None
    try:
        return StructuredOutputsParams(**chosen)
    except (TypeError, ValueError) as error:
        raise RequestError(f"guided_decoding: {error}", param="guided_decoding") from None


def _stops(given: Mapping[str, Any], room: int) -> dict[str, Any]:
    """Ids that end the output, whether the frontend shows them or not."""
    names = ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden")
    _refuse_rest("", given, {"max_tokens", "min_tokens", "ignore_eos", "stop", *names})
    ids = sorted({token_id for name in names for token_id in _typed(given, name, list[int] | None) or ()})
    most = given.get("max_tokens")
    return {
        "max_tokens": max(room, 1) if most is None else most,
        "min_tokens": given.get("min_tokens") or 0,
        "ignore_eos": bool(given.get("ignore_eos")),
        "stop_token_ids": ids or None,
    }


def _outputs(given: Mapping[str, Any]) -> dict[str, Any]:
    shown = {"skip_special_tokens", "return_tokens_as_token_ids", "no_stop_trim"}
    _refuse_rest("", given, {"logprobs", "prompt_logprobs", *shown})
    return {name: given.get(name) for name in ("logprobs", "prompt_logprobs")}


def _group(request: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    group = request.get(name) or {}
    if not isinstance(group, Mapping):
        raise RequestError(f"{name} must be an object, not {type(group).__name__}", param=name)
    return group


def _typed(given: Mapping[str, Any], name: str, kind: Any) -> Any:
    """The field as a value of this type. Raises RequestError."""
    try:
        return msgspec.convert(given.get(name), kind)
    except msgspec.ValidationError as error:
        raise RequestError(f"{name}: {error}", param=name) from None


def _refuse_rest(prefix: str, given: Mapping[str, Any], known: "frozenset[str] | set[str] | Any") -> None:
    """Raises RequestError for a field that is set and not among `known`."""
    for name, value in given.items():
        if name in known or value is None or value in ([], {}):
            continue
        if name in _NEUTRAL and value in _NEUTRAL[name]:
            continue
        raise RequestError(
            f"'{prefix}{name}' is not supported by this engine; leave it out", param=f"{prefix}{name}"
        )
