"""Speculative decoding through all processes: the output of the plain run; right drafts save steps."""

import json
import random
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from atom import LLMEngine, SamplingParams
from atom.benchmarks.serving.speculation import Speculation
from tests.helpers.checkpoints.tiny_models import VOCAB, save_tiny, tiny
from tests.helpers.servers.edges import metrics_text
from tests.helpers.servers.random_server import write_checkpoint
from tests.helpers.servers.server import Server, running_server

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}

pytestmark = pytest.mark.timeout(600)


def requests(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that repeat a pattern, greedy and sampled, with stop ids, penalties and logprobs."""
    source = random.Random(5)
    prompts, params = [], []
    for number in range(count):
        pattern = [source.randrange(VOCAB) for _ in range(source.randrange(1, 6))]
        prompts.append((pattern * 12)[: source.randrange(1, 40)])
        params.append(
            SamplingParams(
                temperature=source.choice([0.0, 0.0, 0.4, 0.8]),
                seed=number,
                max_tokens=source.randrange(1, 60),
                stop_token_ids=[source.randrange(VOCAB)] if source.random() < 0.3 else None,
                min_tokens=source.choice([0, 0, 1]),
                logprobs=source.choice([None, None, 0, 2]),
                frequency_penalty=source.choice([0.0, 0.0, 0.0, 0.3]),
            )
        )
    return prompts, params


def generate(directory: Path, count: int, **options: Any) -> tuple[list[dict[str, Any]], dict[str, Any], int]:
    """(outputs, figures of the drafts, steps)."""
    common: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cpu_threads": 1, "max_num_seqs": 16}
    with LLMEngine(
        str(directory), num_kv_blocks=120, max_num_batched_tokens=128, **common, **options
    ) as made:
        outputs = made.generate(*requests(count))
        made.print_mtp_statistics()
        return outputs, made.get_mtp_statistics(), made.stats().steps


def test_sixty_requests_get_the_tokens_of_the_plain_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    check_requests(tmp_path, 60, least_accepted=10)
    assert "tokens per forward" in capfd.readouterr().out


@pytest.mark.slow
def test_two_hundred_requests_get_the_tokens_of_the_plain_run(tmp_path: Path) -> None:
    plain_steps, steps = check_requests(tmp_path, 200, least_accepted=100)
    assert steps < plain_steps


def check_requests(directory: Path, count: int, least_accepted: int) -> tuple[int, int]:
    """They get the same tokens with drafts; returns the steps without and with them."""
    save_tiny(tiny("llama-gqa"), directory)
    plain, off, plain_steps = generate(directory, count)
    drafted, figures, steps = generate(directory, count, **NGRAM, spec_decode_adaptive=False)
    differing = [
        number
        for number, (one, other) in enumerate(zip(plain, drafted, strict=True))
        if (one["token_ids"], one["finish_reason"]) != (other["token_ids"], other["finish_reason"])
    ]
    assert differing == []
    for one, other in zip(plain, drafted, strict=True):
        assert ("logprobs" in one) == ("logprobs" in other)
        for mine, theirs in zip(one.get("logprobs", ()), other.get("logprobs", ()), strict=True):
            assert mine == pytest.approx(theirs, abs=1e-3)
    assert not off["enabled"] and figures["enabled"]
    assert figures["total_accepted_tokens"] > least_accepted and figures["average_tokens_per_forward"] > 1
    return plain_steps, steps


def post(server: Server, **fields: Any) -> dict[str, Any]:
    body = json.dumps({"temperature": 0, "max_tokens": 60, "ignore_eos": True, **fields}).encode()
    request = urllib.request.Request(
        f"{server.url}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        found: dict[str, Any] = json.load(response)
        return found


def test_a_prediction_of_the_whole_output_is_accepted(tmp_path: Path) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in NGRAM.items()]
    flags.append("--no-spec-decode-adaptive")  # the number of drafts would depend on the time that they take
    model = str(write_checkpoint(tmp_path / "model"))
    arguments = ("--model", model, "--load-dummy", "--device", "cpu", "--server-port", "0", *flags)
    with running_server(*arguments, "--host", "127.0.0.1", "--kv-cache-memory-bytes", str(1 << 27)) as server:
        plain = post(server, prompt="number one")
        before = Speculation.parse(metrics_text(server))
        text = plain["choices"][0]["text"]
        predicted = post(server, prompt="number one", prediction={"type": "content", "content": text})
        after = Speculation.parse(metrics_text(server))
        assert predicted["choices"][0]["text"] == text
        details = predicted["usage"]["completion_tokens_details"]
        assert before is not None and after is not None
        run = after - before
        assert (details["accepted_prediction_tokens"], run.drafted) == (
            run.accepted,
            sum(details.values()),
        )
        assert run.accepted > 30
        places = re.findall(
            r'vllm:spec_decode_num_accepted_tokens_per_pos_total\{.*position="(\d)"', metrics_text(server)
        )
        assert places == ["0", "1", "2", "3"]
        middle = text[20:23]
        stopped = post(
            server, prompt="number one", stop=middle, prediction={"type": "content", "content": text}
        )
        assert stopped["choices"][0]["text"] == text[: text.index(middle)]
