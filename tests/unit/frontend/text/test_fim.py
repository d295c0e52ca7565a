"""`suffix` of completions: the prompts of each family, and the route."""

from pathlib import Path

import pytest

from atom.shared.messages.engine import unpack_ids
from frontend.text.fim import FillInTheMiddle
from frontend.text.tokenizer import Tokenizer
from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.servers.fake_core import FakeCore, Script
from tests.helpers.servers.http_server import running_frontend

FAMILIES = [
    (["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"], "<|fim_prefix|>P<|fim_suffix|>S<|fim_middle|>"),
    (["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], "<fim_prefix>P<fim_suffix>S<fim_middle>"),
    (
        ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
        "<｜fim▁begin｜>P<｜fim▁hole｜>S<｜fim▁end｜>",
    ),
    (["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"], "▁<PRE>P▁<SUF>S▁<MID>"),
    (["[PREFIX]", "[SUFFIX]"], "[SUFFIX]S[PREFIX]P"),
]


@pytest.mark.parametrize(("tags", "expected"), FAMILIES)
def test_the_prompts_of_families(tags: list[str], expected: str) -> None:
    tokenizer = Tokenizer(tiny_tokenizer.build(tags))
    fim = FillInTheMiddle.of(tokenizer)
    assert fim is not None
    ids = fim.prompt("P", "S", lambda text: tokenizer.encode(text, add_special_tokens=False))
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected
    assert fim.stop_token_ids == [tokenizer.added_id(text) for text in tags[3:]]


def test_a_tokenizer_without_markers() -> None:
    assert FillInTheMiddle.of(tiny_tokenizer.tokenizer()) is None
    assert FillInTheMiddle.of(None) is None


def test_the_route(tmp_path: Path) -> None:
    tags, _ = FAMILIES[3]
    checkpoint = tiny_tokenizer.checkpoint(tmp_path, tags)
    tokenizer = Tokenizer.from_checkpoint(checkpoint)
    assert tokenizer is not None
    core = FakeCore(tmp_path, lambda _: Script([70, 71]))
    with core, running_frontend(core, checkpoint) as client:
        status, _ = client.post("/v1/completions", prompt=["def f(", "a ="], suffix="):", max_tokens=2)
        assert status == 200
        sent = core.requests[-2:]
        texts = [tokenizer.decode(unpack_ids(each.prompt_ids), skip_special_tokens=False) for each in sent]
        assert texts == ["▁<PRE>def f(▁<SUF>):▁<MID>", "▁<PRE>a =▁<SUF>):▁<MID>"]
        assert sent[0].stop_token_ids == [tokenizer.added_id("▁<EOT>")]
        for fields, param in (
            ({"prompt": [5, 6]}, "suffix"),
            ({"prompt": [[5, 6]]}, "suffix"),
            ({"prompt": "x", "echo": True}, "echo"),
            ({"prompt": "x", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
            ({"prompt": "x" * 5000}, "prompt"),
        ):
            status, response = client.post("/v1/completions", suffix="b", **fields)
            assert (status, response["error"]["param"]) == (400, param), response
