"""Dynamo's requests and chunks, and the files that its frontend reads; without Dynamo."""

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from atom.integrations.dynamo.card import write_card
from atom.integrations.dynamo.reply import Reply
from atom.integrations.dynamo.request import DynamoRequest, read_request
from frontend.errors import RequestError
from frontend.text.output_processor import SequenceOutput
from frontend.text.token_logprobs import TokenLogprob
from tests.helpers.checkpoints import tiny_tokenizer

# A request as Dynamo 1.6 sends it: what the client has not set is null.
SAMPLING = ["n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature"]
SAMPLING += ["top_p", "top_k", "min_p", "seed", "use_beam_search", "length_penalty"]
SAMPLING += ["include_stop_str_in_output", "guided_decoding"]
STOPS = ["max_tokens", "stop", "stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden"]
STOPS += ["min_tokens", "ignore_eos", "max_thinking_tokens"]
OUTPUTS = ["logprobs", "prompt_logprobs", "skip_special_tokens", "formatted_prompt"]
OUTPUTS += ["return_tokens_as_token_ids"]
GROUPS = {"sampling_options": SAMPLING, "stop_conditions": STOPS, "output_options": OUTPUTS}


def request(**given: Any) -> dict[str, Any]:
    """A request with these options, wherever they belong."""
    groups: dict[str, Any] = {name: dict.fromkeys(fields) for name, fields in GROUPS.items()}
    rest = {"model": "m", "mdc_sum": "", "annotations": [], "routing": None, "multi_modal_data": None}
    for name, value in given.items():
        place = next((groups[group] for group, fields in GROUPS.items() if name in fields), rest)
        place[name] = value
    return {"token_ids": [5, 6, 7], **rest, **groups}


def read(**given: Any) -> DynamoRequest:
    return read_request(request(**given), 100)


def test_what_is_not_set_has_our_defaults() -> None:
    found = read()
    assert (found.prompt_ids, found.rank, found.cache_salt, found.constraint) == ([5, 6, 7], None, "", None)
    params = found.params
    assert (params.max_tokens, params.temperature, params.stop_token_ids, params.n) == (100, 1.0, None, 1)
    defaults = read_request(request(top_p=0.5), 100, {"temperature": 0.25, "top_p": 0.75})
    assert (defaults.params.temperature, defaults.params.top_p) == (0.25, 0.5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", 0.5), ("top_p", 0.5), ("min_p", 0.1), ("top_k", 7), ("seed", 3)),
        *(("presence_penalty", 0.5), ("frequency_penalty", 0.5), ("repetition_penalty", 1.5)),
        *(("max_tokens", 9), ("min_tokens", 2), ("ignore_eos", True)),
        *(("logprobs", 3), ("prompt_logprobs", 0)),
    ],
)
def test_options_become_ours(name: str, value: Any) -> None:
    assert getattr(read(**{name: value}).params, name) == value


def test_stop_ids_end_the_output_whether_they_are_shown_or_not() -> None:
    found = read(stop_token_ids=[9], stop_token_ids_visible=[8], stop_token_ids_hidden=[1, 9])
    assert found.params.stop_token_ids == [1, 8, 9]


@pytest.mark.parametrize("kind", ["json", "regex", "choice", "grammar", "structural_tag"])
def test_guided_decoding_is_a_constraint(kind: str) -> None:
    value: Any = {"choice": ["a", "b"], "json": {"type": "object"}}.get(kind, "a+")
    found = read(guided_decoding={**dict.fromkeys(["json", "regex", "choice", "backend"]), kind: value})
    assert found.constraint is not None and found.constraint.field == "guided_decoding"


def test_the_router_chooses_the_rank_and_the_salt() -> None:
    routing = {"dp_rank": 2, "backend_instance_id": 17, "lora_name": None, "cache_salt": "s"}
    found = read(routing=routing)
    assert (found.rank, found.cache_salt) == (2, "s")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        *(({"n": 2}, "n"), ({"best_of": 3}, "best_of"), ({"use_beam_search": True}, "use_beam_search")),
        *(({"length_penalty": 0.5}, "length_penalty"), ({"max_thinking_tokens": 5}, "max_thinking_tokens")),
        *(({"stop_token_ids": 5}, "stop_token_ids"), ({"stop_token_ids": ["5"]}, "stop_token_ids")),
        *(({"token_ids": 5}, "token_ids"), ({"token_ids": [1.5]}, "token_ids")),
        *(({"routing": {"dp_rank": "1"}}, "dp_rank"), ({"routing": {"cache_salt": 1}}, "cache_salt")),
        *(({"formatted_prompt": True}, "formatted_prompt"), ({"temperature": -1}, "temperature")),
        (
            {"guided_decoding": {"regex": "a", "whitespace_pattern": " "}},
            "guided_decoding.whitespace_pattern",
        ),
        ({"guided_decoding": {"regex": "a", "backend": "outlines"}}, "guided_decoding.backend"),
        ({"guided_decoding": {"regex": "a", "choice": ["b"]}}, "guided_decoding"),
        *(({"routing": {"lora_name": "x"}}, "routing.lora_name"), ({"unheard_of": 1}, "unheard_of")),
        *(
            ({"multi_modal_data": {"image_url": []}}, "multi_modal_data"),
            ({"prefill_result": {"a": 1}}, "prefill"),
        ),
        ({"extra_args": {"lookahead": 3}}, "extra_args.lookahead"),
        *(({"stop_conditions": [1]}, "stop_conditions"), ({"min_tokens": 5, "max_tokens": 3}, "min_tokens")),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(given: dict[str, Any], named: str) -> None:
    made = request(**{name: value for name, value in given.items() if name not in GROUPS})
    made |= {name: value for name, value in given.items() if name in GROUPS}
    with pytest.raises(RequestError, match=named):
        read_request(made, 100)


def test_neutral_values_are_accepted() -> None:
    read(n=1, best_of=1, use_beam_search=False, length_penalty=1.0, formatted_prompt=False)
    read(stop=["x"], include_stop_str_in_output=True, skip_special_tokens=False, extra_args={"nvext": {}})


def update(ids: list[int], **fields: Any) -> SequenceOutput:
    return SequenceOutput(40, array("i", ids), **fields)


def test_chunks_have_new_ids_and_the_last_one_the_usage() -> None:
    reply = Reply([40], 10, tokens_as_ids=False)
    assert reply.chunk(update([3, 4], cached_tokens=8)) == {"token_ids": [3, 4], "index": 0}
    last = reply.chunk(update([9], finished=True, reason="stop_9", stop_reason=9))
    usage = {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}
    usage |= {"prompt_tokens_details": {"cached_tokens": 8}}  # type: ignore[dict-item]
    assert last == {
        "token_ids": [9],
        "index": 0,
        "finish_reason": "stop",
        "stop_reason": 9,
        "completion_usage": usage,
    }


@pytest.mark.parametrize(
    ("reason", "shown"),
    [("eos", "stop"), ("stop_5", "stop"), ("max_tokens", "length"), ("aborted", "cancelled")],
)
def test_finish_reasons_are_dynamos(reason: str, shown: str) -> None:
    chunk = Reply([40], 1, tokens_as_ids=False).chunk(update([], finished=True, reason=reason))
    assert chunk["finish_reason"] == shown


@pytest.mark.parametrize("tokens_as_ids", [False, True])
def test_log_probabilities_have_the_sampled_token(tokens_as_ids: bool) -> None:
    reply = Reply([40], 1, tokens_as_ids)
    entries = [TokenLogprob(3, -0.5, 1, [(3, -0.5), (4, -1.0)]), TokenLogprob(7, -3.0, 9, [(4, -0.25)])]
    chunk = reply.chunk(update([3, 7], logprobs=entries, prompt_logprobs=[entries[1]]))
    assert chunk["log_probs"] == [-0.5, -3.0]
    ranked = [
        [(one["rank"], one["token_id"], one["logprob"]) for one in top] for top in chunk["top_logprobs"]
    ]
    assert ranked == [[(1, 3, -0.5), (2, 4, -1.0)], [(1, 4, -0.25), (9, 7, -3.0)]]
    assert chunk["top_logprobs"][0][0]["token"] == ("token_id:3" if tokens_as_ids else None)
    last = reply.chunk(update([], finished=True, reason="eos"))
    expected = [None, {"4": {"logprob": -0.25, "rank": 1}, "7": {"logprob": -3.0, "rank": 9}}]
    assert last["engine_data"] == {"prompt_logprobs": expected}


def test_a_card_has_what_the_frontend_reads_and_is_named_by_its_content(tmp_path: Path) -> None:
    checkpoint = tiny_tokenizer.checkpoint(tmp_path, eos_token_ids=[1])
    card = write_card(checkpoint, tmp_path / "cards")
    assert write_card(checkpoint, tmp_path / "cards") == card
    assert sorted(file.name for file in card.iterdir()) == [
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    ]
    assert "[assistant]" in json.loads((card / "tokenizer_config.json").read_text())["chat_template"]
    assert json.loads((card / "generation_config.json").read_text()) == {"eos_token_id": [1]}
    other = tiny_tokenizer.checkpoint(tmp_path, eos_token_ids=[2])
    assert write_card(other, tmp_path / "cards") != card


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    checkpoint = tiny_tokenizer.checkpoint(tmp_path, tokenizer_file=None)
    with pytest.raises(ValueError, match="has no tokenizer"):
        write_card(checkpoint, tmp_path)
