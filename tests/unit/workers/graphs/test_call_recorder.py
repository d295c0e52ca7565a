"""Recordings of steps on a CPU: the same results from other inputs, one memory, and what is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from atom.shared.config.resolve import Dtype
from atom_ops import native_impl
from atom_ops.native_impl.calls import call
from tests.helpers.checkpoints.tiny_models import prompt_of, save_tiny, tiny
from tests.helpers.engine.core_side import generate
from tests.helpers.engine.teacher_forcing import TinyWorker
from workers.graphs.call_recorder import CallRecorder, NotRecordableError

CPU = torch.device("cpu")
needs_kernels = pytest.mark.skipif(not native_impl.runs_on(CPU), reason="needs a C++ compiler")


def silu_and_mul(x_T2F: Tensor) -> Tensor:
    """By the kernel."""
    out_TF = x_T2F.new_empty(len(x_T2F), x_T2F.shape[1] // 2)
    call("silu_and_mul", x_T2F.dtype, x_T2F, out_TF, *out_TF.shape)
    return out_TF


def record(
    body: Callable[[], object], recorder: CallRecorder | None = None
) -> tuple[Callable[[], object], object]:
    return (recorder or CallRecorder())(body, "body")


@needs_kernels
def test_a_replay_computes_from_what_the_inputs_are_now() -> None:
    """Kernels, operators with new, mutated and viewed results, in their order."""
    x, table = torch.randn(3, 8), torch.randn(9, 4)
    total = torch.zeros(3, 4)

    def body() -> Tensor:
        gated = silu_and_mul(x * 2)
        found = table[gated.argmax(1)].view(-1).view(3, 4)
        total.add_(found)
        return silu_and_mul(torch.cat((gated, found), 1)) + total

    replay, result = record(body)
    assert isinstance(result, Tensor)
    for _ in range(3):
        x.normal_()
        table.normal_()
        total.fill_(1.0)
        wanted = body()
        total.fill_(1.0)
        replay()
        torch.testing.assert_close(result, wanted, rtol=0, atol=0)


@needs_kernels
def test_memory_is_used_again_but_for_results() -> None:
    recorder, x = CallRecorder(), torch.randn(4, 64)

    def body() -> Tensor:
        y = x
        for _ in range(20):
            y = torch.cat([silu_and_mul(y)] * 2, 1) + x
        return silu_and_mul(y)

    replay, first = record(body, recorder)
    used = len(recorder._memory._blocks)
    assert used <= 3
    other, second = record(body, recorder)
    assert len(recorder._memory._blocks) == used + 1, "the first result is still there"
    assert isinstance(first, Tensor) and isinstance(second, Tensor)
    x.normal_()
    replay()
    before = first.clone()
    x.normal_()
    other()
    assert first.equal(before) and not second.equal(before)
    address = first.data_ptr()
    del first, replay
    _, third = record(body, recorder)
    assert isinstance(third, Tensor) and third.data_ptr() == address


@needs_kernels
def test_inputs_of_kernels_are_kept() -> None:
    """Also those that are made where torch shows no operator."""
    array = torch.ones(2, 2**20).numpy()
    replay, result = record(lambda: silu_and_mul(torch.from_numpy(array.copy())))
    assert isinstance(result, Tensor)
    replay()
    assert result.equal(silu_and_mul(torch.from_numpy(array)))


@pytest.mark.parametrize(
    ("read", "named"),
    [
        (lambda x: x.tolist(), "tolist"),
        (lambda x: x.numpy(), "numpy"),
        (lambda x: x[0, 0].item(), "item"),
        (lambda x: 1 if x[0, 0] > 0 else 2, "bool"),
        (lambda x: int(x[0, 0]), "int"),
        (lambda x: range(5)[x[0, 0].long()], "index"),
        (lambda x: x[x > 0], "aten.index"),
        (lambda x: x.nonzero(), "aten.nonzero"),
        (lambda x: x.masked_select(x > 0), "aten.masked_select"),
        (lambda x: torch.arange(3).repeat_interleave(x[0].long().abs()), "aten.repeat_interleave"),
        (lambda x: x.to_mkldnn(), "aten.to_mkldnn"),
    ],
)
def test_what_depends_on_values_is_refused(read: Callable[[Tensor], object], named: str) -> None:
    x = torch.randn(3, 3)
    with pytest.raises(NotRecordableError, match=named):
        record(lambda: read(x + 1))
    assert record(lambda: x + 1)[1] is not None, "an abandoned recording leaves no trace"
    assert x.tolist()


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window-mha-tied", "qwen3"])
def test_recorded_steps_change_no_token(name: str, dtype: Dtype, tmp_path: Path) -> None:
    """Rows join and leave; a step of a size that is not recorded is padded, or too large."""
    save_tiny(tiny(name), tmp_path)

    def tokens(worker: TinyWorker) -> list[list[int]]:
        prompts = [prompt_of(length, length) for length in (64, 5, 37, 11, 3)]
        return generate(worker.core(), worker.execute, prompts, 12, chunk=24, stagger=2)

    worker = TinyWorker(tmp_path, dtype, capture_sizes="[1,3]", graph_mode="FULL_DECODE_ONLY")
    assert worker.worker._runner._sizes.decode_rows == [1, 3]
    assert tokens(worker) == tokens(TinyWorker(tmp_path, dtype))


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3", "llama-odd-gqa"])
def test_models_that_cannot_be_recorded_run_eagerly(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tiny(name), tmp_path)
    with caplog.at_level("INFO"):
        worker = TinyWorker(tmp_path, capture_sizes="[1,3]", graph_mode="FULL_DECODE_ONLY")
    assert not worker.worker._runner._sizes.decode_rows
    (line,) = [each.getMessage() for each in caplog.records if "recorded" in each.getMessage()]
    assert line.startswith("decode steps are not recorded: ")
