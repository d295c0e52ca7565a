"""A device that runs out of memory in a step: the requests that need the memory fail, and no others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.messages.engine import LogitsProcessors, Sampling
from tests.helpers.checkpoints.tiny_models import engine_config, place, prompt_of, save_tiny, tiny
from tests.helpers.engine.whole_engine import Output, WholeEngine
from workers.batch.step_inputs import AppliedBatch
from workers.memory.memory_guard import SMALLER_CACHE, MemoryGuard, explain_out_of_memory
from workers.model_runner import ModelRunner
from workers.sampling import sampler
from workers.sampling.logits_processor_state import LogitsProcessorState
from workers.worker import Worker

CPU = torch.device("cpu")
BLOCKS = 200
PENALISED = LogitsProcessors(repetition_penalty=1.5, presence_penalty=0.5, bad_words=[[1, 2]])
PLAIN, HOT, PROCESSED, SCORED, PROMPT_SCORED = 1, 2, 3, 4, 5


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    names = ("llama-gqa", "qwen3-next")
    return {name: save_tiny(tiny(name), tmp_path_factory.mktemp(name))[1] for name in names}


def sampling(temperature: float = 0.0, **fields: Any) -> Sampling:
    return Sampling(temperature, 0, 1.0, 0.0, 3, **fields)


def requests() -> dict[int, dict[str, Any]]:
    """One request of each kind, by its number."""
    return {
        PLAIN: {"sampling": sampling()},
        HOT: {"sampling": sampling(1.3)},
        PROCESSED: {"sampling": sampling(logits_processors=PENALISED)},
        SCORED: {"sampling": sampling(logprobs=2)},
        PROMPT_SCORED: {"sampling": sampling(), "prompt_logprobs": 2},
    }


def engine(checkpoint: Checkpoint) -> WholeEngine:
    worker = Worker(engine_config(), checkpoint, place(), lambda *progress: None)
    caching = not checkpoint.keeps_states
    return WholeEngine(worker, [BLOCKS] * groups(checkpoint), max_tokens=32, caching=caching)


def groups(checkpoint: Checkpoint) -> int:
    return 2 if checkpoint.keeps_states else 1


def run(made: WholeEngine) -> dict[int, Output]:
    """All requests at once, 12 tokens each; every block is free afterwards."""
    for number, fields in requests().items():
        made.add(number, prompt_of(20, number), 12, **fields)
    made.run()
    assert made.core.stats().kv_blocks_used == 0
    return made.outputs


def check_same(output: Output, expected: Output) -> None:
    """Prompts may be cut into other chunks, which changes the last bits of their log probabilities."""
    assert output.token_ids == expected.token_ids and not output.error
    assert output.prompt_logprobs == pytest.approx(expected.prompt_logprobs, abs=1e-3)


def failing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at_call: int) -> None:
    """Let one call of `owner.name` run out of memory."""
    compute: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def instead(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at_call:
            raise torch.OutOfMemoryError("no memory for this test")
        return compute(*args, **kwargs)

    monkeypatch.setattr(owner, name, instead)


@pytest.fixture(scope="module")
def undisturbed(checkpoints: dict[str, Checkpoint]) -> dict[int, Output]:
    outputs = run(engine(checkpoints["llama-gqa"]))
    assert all(len(output.token_ids) == 12 and not output.error for output in outputs.values())
    return outputs


@pytest.mark.parametrize(
    ("owner", "name", "at_call", "failed", "reason"),
    [
        (LogitsProcessorState, "apply", 4, PROCESSED, "the logits processors"),
        (LogitsProcessorState, "record", 1, PROCESSED, "the logits processors"),
        (LogitsProcessorState, "gather", 2, PROCESSED, "the logits processors"),
        (LogitsProcessorState, "gather", 6, PROCESSED, "the logits processors"),
        (LogitsProcessorState, "_fill_record", 1, PROCESSED, "the logits processors"),
        (sampler, "_logprobs", 3, SCORED, "the log probabilities"),
        (ModelRunner, "_prompt_logprobs", 2, PROMPT_SCORED, "the prompt log probabilities"),
    ],
)
def test_one_request_fails_and_the_others_get_the_same_tokens(
    checkpoints: dict[str, Checkpoint],
    undisturbed: dict[int, Output],
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    at_call: int,
    failed: int,
    reason: str,
) -> None:
    made = engine(checkpoints["llama-gqa"])
    failing(monkeypatch, owner, name, at_call)
    outputs = run(made)
    error = outputs[failed].error
    assert error == f"the device has too little memory for {reason} of this request: try again later"
    assert len(outputs[failed].token_ids) < 12
    for number, output in outputs.items():
        if number != failed:
            check_same(output, undisturbed[number])


def failing_forward(
    monkeypatch: pytest.MonkeyPatch, is_wanted: Callable[[AppliedBatch], bool], times: int = 1
) -> None:
    """Let the first wanted forward pass run out of memory at its end, when KV is written already.

    With `times` also those that follow it.
    """
    compute = ModelRunner._forward
    left = times

    def instead(runner: ModelRunner, applied: AppliedBatch) -> Any:
        nonlocal left
        forward = compute(runner, applied)
        if left and (left < times or is_wanted(applied)):
            left -= 1
            raise torch.OutOfMemoryError("no memory for this test")
        return forward

    monkeypatch.setattr(ModelRunner, "_forward", instead)


def is_mixed(applied: AppliedBatch) -> bool:
    return bool(applied.decodes.any() and not applied.decodes.all())


def check_failed(outputs: dict[int, Output], undisturbed: dict[int, Output], failed: set[int]) -> None:
    assert {number for number, output in outputs.items() if output.error} == failed
    for number in failed:
        assert "too little memory for the forward pass" in outputs[number].error
    for number in outputs.keys() - failed:
        check_same(outputs[number], undisturbed[number])


def test_decodes_survive_a_failed_mixed_step(
    checkpoints: dict[str, Checkpoint], undisturbed: dict[int, Output], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first mixed step decodes one request and prefills three."""
    made = engine(checkpoints["llama-gqa"])
    failing_forward(monkeypatch, is_mixed)
    check_failed(run(made), undisturbed, {HOT, PROCESSED, SCORED})


def test_a_retry_that_fails_too_ends_the_whole_step(
    checkpoints: dict[str, Checkpoint], undisturbed: dict[int, Output], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine(checkpoints["llama-gqa"])
    failing_forward(monkeypatch, is_mixed, times=2)
    check_failed(run(made), undisturbed, {PLAIN, HOT, PROCESSED, SCORED})


def test_a_failed_decode_step_ends_its_requests_and_the_next_ones_run(
    checkpoints: dict[str, Checkpoint], undisturbed: dict[int, Output], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine(checkpoints["llama-gqa"])
    failing_forward(monkeypatch, lambda applied: bool(applied.decodes.all()))
    check_failed(run(made), undisturbed, set(requests()))
    assert {number: output.token_ids for number, output in run(made).items()} == {
        number: output.token_ids for number, output in undisturbed.items()
    }


def test_recurrent_states_are_not_updated_twice(
    checkpoints: dict[str, Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With these every row of the failed step fails; the others are as undisturbed."""
    expected = run(engine(checkpoints["qwen3-next"]))
    made = engine(checkpoints["qwen3-next"])
    failing_forward(monkeypatch, is_mixed)
    check_failed(run(made), expected, {PLAIN, HOT, PROCESSED, SCORED})


def test_sampling_without_memory_ends_the_step_and_not_the_worker(
    checkpoints: dict[str, Checkpoint], undisturbed: dict[int, Output], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine(checkpoints["llama-gqa"])
    failing(monkeypatch, ModelRunner, "_sample", 1)
    outputs = run(made)
    assert {number for number, output in outputs.items() if output.error} == {PLAIN}
    for number in outputs.keys() - {PLAIN}:
        check_same(outputs[number], undisturbed[number])


def test_among_several_ranks_out_of_memory_ends_the_worker() -> None:
    def compute() -> None:
        raise torch.OutOfMemoryError("Tried to allocate 2 GiB.\nMore lines.")

    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        MemoryGuard(CPU, num_ranks=2).attempt("the forward pass", compute)
    assert MemoryGuard(CPU, num_ranks=1).attempt("the forward pass", compute) is None


def test_the_end_of_a_worker_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 20, 99 << 20))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 80 << 20)
    expected = (
        r"cuda:1 has too little memory for a step: 3 of its 99 MiB are free, 80 are allocated by this "
        r"worker, 16 are used by other processes.*: lower --gpu-memory"
    )
    with (
        pytest.raises(MemoryError, match=expected),
        explain_out_of_memory(torch.device("cuda", 1), "a step", SMALLER_CACHE),
    ):
        raise torch.OutOfMemoryError("Tried to allocate 2 GiB.")
