"""The command line: defaults, and conflicts."""

import argparse
from collections.abc import Callable

import pytest

from atom.benchmarks.serving.errors import BenchmarkError

Parse = Callable[..., argparse.Namespace]

DEFAULTS = {
    "backend": "vllm",
    "base_url": None,
    "host": "127.0.0.1",
    "port": 8000,
    "endpoint": "/v1/completions",
    "dataset_path": None,
    "max_concurrency": None,
    "tokenizer": None,
    "best_of": 1,
    "use_beam_search": False,
    "num_prompts": 1000,
    "logprobs": None,
    "request_rate": float("inf"),
    "burstiness": 1.0,
    "seed": 0,
    "trust_remote_code": False,
    "disable_tqdm": False,
    "profile": False,
    "save_result": False,
    "save_detailed": False,
    "metadata": None,
    "result_filename": None,
    "ignore_eos": False,
    "percentile_metrics": ["ttft", "tpot", "itl"],
    "metric_percentiles": [99.0],
    "goodput": None,
    "sonnet_input_len": 550,
    "sonnet_output_len": 150,
    "sonnet_prefix_len": 200,
    "sharegpt_output_len": None,
    "random_input_len": 1024,
    "random_output_len": 128,
    "random_range_ratio": 1.0,
    "random_prefix_len": 0,
    "use_chat_template": False,
    "hf_subset": None,
    "hf_split": None,
    "hf_output_len": None,
    "tokenizer_mode": "auto",
    "served_model_name": None,
    "lora_modules": None,
    "num_warmups": 1,
}


def test_defaults_are_the_documented_ones(parse: Parse, capsys: pytest.CaptureFixture[str]) -> None:
    args = parse()
    assert {name: getattr(args, name) for name in DEFAULTS} == DEFAULTS
    assert args.dataset_name == "random"
    assert "using --dataset-name random" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--backend", "openai-chat"], "--endpoint that ends with chat/completions"),
        (["--backend", "tgi"], "--endpoint that ends with generate_stream"),
        (["--endpoint", "/v1/models"], "ends with completions or profile"),
        (["--backend", "deepspeed-mii", "--ignore-eos"], "does not support --ignore-eos"),
        (
            ["--backend", "tgi", "--endpoint", "/generate_stream", "--logprobs", "3"],
            "does not support --logprobs",
        ),
        (
            ["--backend", "tensorrt-llm", "--endpoint", "/generate_stream", "--best-of", "2"],
            "not support --best-of",
        ),
        (
            ["--backend", "tgi", "--endpoint", "/generate_stream", "--use-beam-search"],
            "not support --use-beam-search",
        ),
        (["--random-range-ratio", "1.5"], "--random-range-ratio 1.5"),
        (["--dataset-name", "sonnet", "--use-chat-template"], "is for --dataset-name random"),
        (["--sweep", "1", "4", "--max-concurrency", "2"], "omit --max-concurrency"),
    ],
)
def test_conflicting_flags(parse: Parse, flags: list[str], message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        parse(*flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--goodput", "itl:5"], "METRIC:MS"),
        (["--goodput", "ttft:0"], "above 0"),
        (["--goodput", "ttft"], "METRIC:MS"),
        (["--percentile-metrics", "ttft,speed"], "'speed' is not a metric"),
        (["--metric-percentiles", "101"], "from 0 to 100"),
        (["--metric-percentiles", "many"], "numbers separated by commas"),
        (["--metadata", "novalue"], "KEY=VALUE"),
        (["--num-prompts", "0"], "at least 1"),
        (["--request-rate", "-1"], "above 0"),
        (["--request-rate", "fast"], "is not a number"),
        (["--dataset-name", "other"], "invalid choice"),
        (["--max-concurency", "4"], "did you mean --max-concurrency"),
    ],
)
def test_invalid_values_are_one_line(
    parse: Parse, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*flags)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_lists(parse: Parse) -> None:
    args = parse("--goodput", "ttft:100", "tpot:50", "--metadata", "tp=8", "note=a=b")
    assert dict(args.goodput) == {"ttft": 100.0, "tpot": 50.0}
    assert args.metadata == [("tp", "8"), ("note", "a=b")]
    assert parse("--metric-percentiles", "25,50,99.9").metric_percentiles == [25, 50, 99.9]
