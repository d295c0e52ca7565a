"""Requests of every dataset: lengths, order, refusals."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from atom.benchmarks.serving.datasets import SampleRequest, TextSource, load_requests
from atom.benchmarks.serving.errors import BenchmarkError

Parse = Callable[..., argparse.Namespace]


def load(parse: Parse, source: TextSource, *flags: object) -> list[SampleRequest]:
    return load_requests(parse(*flags), source)


def length(source: TextSource, request: SampleRequest) -> int:
    assert source.tokenizer is not None and isinstance(request.prompt, str)
    return len(source.tokenizer.encode(request.prompt))


def random_flags(*more: object) -> list[object]:
    return ["--dataset-name", "random", "--num-prompts", 30, "--random-input-len", 50, *more]


def test_random_texts_have_the_reported_length(parse: Parse, source: TextSource) -> None:
    requests = load(parse, source, *random_flags("--random-output-len", 7))
    assert len(requests) == 30
    assert {request.prompt_len for request in requests} == {50}
    assert {request.output_len for request in requests} == {7}
    assert all(length(source, request) == 50 for request in requests)
    assert len({request.prompt for request in requests}) == 30


def test_random_lengths_start_at_the_ratio(parse: Parse, source: TextSource) -> None:
    flags = ["--random-output-len", 20, "--random-range-ratio", 0.8, "--num-prompts", 300]
    requests = load(parse, TextSource(None, 100), *random_flags(*flags))
    assert {request.prompt_len for request in requests} == set(range(40, 51))
    assert {request.output_len for request in requests} == set(range(16, 21))


def test_random_prompts_share_only_the_prefix(parse: Parse, source: TextSource) -> None:
    requests = load(parse, TextSource(None, 5000), *random_flags("--random-prefix-len", 8))
    prompts = [request.prompt for request in requests]
    assert {len(prompt) for prompt in prompts} == {58}
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 1
    assert len({tuple(prompt[8:12]) for prompt in prompts}) == 30
    texts = load(parse, source, *random_flags("--random-prefix-len", 8))
    assert all(length(source, request) == 58 for request in texts)


def test_the_length_includes_the_chat_template(parse: Parse, source: TextSource) -> None:
    requests = load(parse, source, *random_flags("--use-chat-template"))
    assert all(request.prompt.startswith("[user]") for request in requests)
    assert all(length(source, request) == request.prompt_len == 50 for request in requests)


def test_equal_seeds_give_equal_requests(parse: Parse, source: TextSource) -> None:
    first, again = (load(parse, source, *random_flags("--seed", 3)) for _ in range(2))
    assert first == again
    assert first != load(parse, source, *random_flags("--seed", 4))


def test_ids_of_a_model_without_tokenizer_are_in_its_vocabulary(parse: Parse) -> None:
    requests = load(parse, TextSource(None, 17), *random_flags())
    assert {token for request in requests for token in request.prompt} == set(range(17))
    with pytest.raises(BenchmarkError, match="set --tokenizer"):
        load(parse, TextSource(None, 17), *random_flags("--use-chat-template"))


def conversation(asked: str, answered: str) -> dict[str, object]:
    return {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": answered}]}


@pytest.fixture
def sharegpt(tmp_path: Path) -> Path:
    path = tmp_path / "sharegpt.json"
    rows = [conversation(f"number {i}: hello world", "one two three four " * i) for i in range(1, 6)]
    rows += [
        conversation("a", "far too short a question"),
        conversation("word " * 5000, "far too long a one"),
    ]
    rows += [{"conversations": [{"from": "human", "value": "never answered"}]}]
    path.write_text(json.dumps(rows))
    return path


@pytest.mark.parametrize("name", [["--dataset-name", "sharegpt"], []])
def test_sharegpt_uses_the_recorded_lengths(
    parse: Parse, source: TextSource, sharegpt: Path, name: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    requests = load(parse, source, *name, "--dataset-path", sharegpt, "--num-prompts", 9)
    assert len(requests) == 5 and "Only 5 of 9 prompts" in capsys.readouterr().out
    assert source.tokenizer is not None
    for request in requests:
        assert isinstance(request.prompt, str) and request.prompt.startswith("number")
        answer = "one two three four " * int(request.prompt[7])
        assert request.prompt_len == length(source, request)
        assert request.output_len == len(source.tokenizer.encode(answer))


def test_sharegpt_with_a_length(parse: Parse, source: TextSource, sharegpt: Path) -> None:
    flags = ["--dataset-path", sharegpt, "--num-prompts", 2, "--sharegpt-output-len", 5]
    assert [request.output_len for request in load(parse, source, *flags)] == [5, 5]


def test_burstgpt_takes_the_lengths_of_answered_requests(
    parse: Parse, source: TextSource, tmp_path: Path
) -> None:
    path = tmp_path / "burst.csv"
    rows = ["5,GPT-4,12,3", "6,GPT-4,20,0", "7,ChatGPT,99,9", "8,GPT-4,30,4"]
    path.write_text("\n".join(["Timestamp,Model,Request tokens,Response tokens", *rows]) + "\n")
    flags = ["--dataset-name", "burstgpt", "--dataset-path", path, "--num-prompts", 20]
    requests = load(parse, source, *flags)
    assert {(request.prompt_len, request.output_len) for request in requests} == {(12, 3), (30, 4)}
    assert len(requests) == 20 and all(length(source, one) == one.prompt_len for one in requests)


def test_sonnet_prompts_share_a_prefix(parse: Parse, source: TextSource, tmp_path: Path) -> None:
    path = tmp_path / "sonnet.txt"
    path.write_text("".join(f"the quick brown fox number {i:02d}\n" for i in range(40)))
    flags = ["--dataset-name", "sonnet", "--dataset-path", path, "--num-prompts", 6]
    requests = load(parse, source, *flags, "--sonnet-output-len", 11)
    assert all(request.output_len == 11 for request in requests)
    assert all(length(source, one) == one.prompt_len and abs(one.prompt_len - 550) < 30 for one in requests)
    lines = [str(request.prompt).splitlines() for request in requests]
    assert len({tuple(one[:5]) for one in lines}) == 1 and len({tuple(one) for one in lines}) == 6
    with pytest.raises(BenchmarkError, match="--sonnet-prefix-len must be over"):
        load(parse, source, *flags, "--sonnet-prefix-len", 1)


def test_hf_reads_local_lines(parse: Parse, source: TextSource, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [conversation(f"hello {i}", "a b c") for i in range(4)]
    picture = {"image": "http://host/x.png", **conversation("look", "yes")}
    path.write_text("\n".join(json.dumps(row) for row in rows))
    flags = ["--dataset-name", "hf", "--dataset-path", path, "--num-prompts", 3, "--hf-output-len", 8]
    requests = load(parse, source, *flags)
    assert len(requests) == 3 and all(request.output_len == 8 for request in requests)
    path.write_text(json.dumps(picture))
    with pytest.raises(BenchmarkError, match="use openai-chat"):
        load(parse, source, *flags)
    chat = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
    (request,) = load(parse, source, *flags, *chat)
    assert request.multi_modal_content == {"type": "image_url", "image_url": {"url": "http://host/x.png"}}


@pytest.mark.parametrize(
    ("flags", "content", "message"),
    [
        (["--dataset-name", "sharegpt"], None, "sharegpt needs --dataset-path"),
        (["--dataset-name", "hf"], None, "hf needs --dataset-path"),
        (["--dataset-name", "sharegpt", "--dataset-path", "gone.json"], None, "No such file"),
        (["--dataset-path", "FILE"], "{", "is not JSON"),
        (["--dataset-path", "FILE"], '{"a": 1}', "a list of conversations"),
        (["--dataset-path", "FILE"], "[]", "no request within the limits"),
        (["--dataset-name", "burstgpt", "--dataset-path", "FILE"], "a,b\n1,2\n", "is not a BurstGPT file"),
    ],
)
def test_invalid_datasets_are_refused(
    parse: Parse, source: TextSource, tmp_path: Path, flags: list[str], content: str | None, message: str
) -> None:
    file = tmp_path / "data.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(BenchmarkError, match=message):
        load(parse, source, *[str(file) if flag == "FILE" else flag for flag in flags])


def test_text_needs_a_tokenizer(parse: Parse, sharegpt: Path) -> None:
    with pytest.raises(BenchmarkError, match="set --tokenizer, or use --dataset-name random"):
        load(parse, TextSource(None, 100), "--dataset-path", sharegpt)
