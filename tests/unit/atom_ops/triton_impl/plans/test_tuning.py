"""Choosing and storing plans, with a fake stopwatch."""

import contextlib
import itertools
import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from torch import Tensor

from atom.shared.utils import file_lock
from atom.shared.utils.file_lock import exclusive
from atom_ops import backend, linear, triton_impl
from atom_ops.triton_impl.experts import expert_plans
from atom_ops.triton_impl.plans.linear_plans import LinearPlan
from atom_ops.triton_impl.plans.plan_file import Key, PlanFile
from atom_ops.triton_impl.plans.plan_format import Machine, Shape
from atom_ops.triton_impl.plans.shipped import shipped_plans
from atom_ops.triton_impl.plans.tuning import (
    CLASSES,
    PHASE,
    by_shape,
    candidates,
    classes_of,
    fastest,
    is_candidate,
    tune,
)
from atom_ops.triton_impl.quantized.known_plans import with_general
from atom_ops.triton_impl.quantized.quantized_plans import MANY, GemmPlan
from atom_ops.triton_impl.quantized.quantized_plans import Key as QuantizedKey

H200 = shipped_plans("NVIDIA H200")
MACHINE = Machine("Some GPU 9000 (rev 2)", "2.11.0+cu130", "3.6.0")
SHAPES: list[Shape] = [(4096, 1024), (1024, 2048)]
DEADLINE_S = 60
Heard = list[tuple[str, int, int]]


class FakeBench:
    """Torch takes 10 us; plans take `seconds`, and are invalid if that is None."""

    def __init__(self, seconds: Callable[[LinearPlan], float | None] = lambda plan: 20e-6) -> None:
        self._seconds = seconds
        self.measured: list[tuple[Shape, int]] = []
        self.rounds: dict[LinearPlan | None, list[int]] = {}

    def valid_plans(self, plans: Sequence[LinearPlan], shape: Shape) -> list[LinearPlan]:
        return [plan for plan in plans if self._seconds(plan) is not None]

    def stopwatch(self, plan: LinearPlan | None, shape: Shape, tokens: int) -> Callable[[int], float]:
        if plan is None:
            self.measured.append((shape, tokens))
        taken = 10e-6 if plan is None else self._seconds(plan)
        assert taken is not None

        def watch(rounds: int) -> float:
            self.rounds.setdefault(plan, []).append(rounds)
            return taken

        return watch


def file_in(directory: Path, machine: Machine = MACHINE) -> PlanFile:
    return PlanFile(directory, machine, is_candidate)


def silent(phase: str, done: int, total: int) -> None:
    pass


def fast_up_to(tokens: int) -> FakeBench:
    """Plans are twice as fast as torch up to some number of tokens, and half as fast above."""
    return FakeBench(lambda plan: 5e-6 if plan.tokens <= tokens else 20e-6)


@pytest.mark.parametrize("shape", [*SHAPES, (151936, 4096), (960, 576), (96, 320)], ids=str)
@pytest.mark.parametrize(("least", "tokens"), CLASSES)
def test_candidates_are_few_and_of_their_class(shape: Shape, least: int, tokens: int) -> None:
    plans = candidates(shape, least, tokens)
    assert 2 <= len(plans) <= 20 and len(set(plans)) == len(plans)
    assert {(plan.least, plan.tokens) for plan in plans} == {(least, tokens)}
    assert all(plan.rows <= shape[0] for plan in plans)
    assert tokens == 1 or not any(isinstance(plan, LinearPlan) and plan.vector for plan in plans)
    assert all(is_candidate(shape, plan) for plan in plans)


def test_classes_leave_no_gap() -> None:
    assert CLASSES[0][0] == 1
    assert all(least == before + 1 for (_, before), (least, _) in itertools.pairwise(CLASSES))


def test_the_fastest_wins_and_slow_plans_are_measured_briefly() -> None:
    plans = candidates(SHAPES[0], 2, 16)
    times = dict.fromkeys(plans, 30e-6) | {plans[2]: 5.2e-6, plans[4]: 5e-6}
    bench = FakeBench(times.__getitem__)
    assert fastest(bench, SHAPES[0], 2, 16) == plans[4]
    assert len(bench.rounds[plans[2]]) == 2
    assert len(bench.rounds[plans[0]]) == len(bench.rounds[None]) == 1


def test_an_invalid_plan_never_wins() -> None:
    plans = candidates(SHAPES[0], 1, 1)
    times: dict[LinearPlan, float | None] = dict.fromkeys(plans, 9e-6)
    assert fastest(FakeBench(times.__getitem__), SHAPES[0], 1, 1) == plans[0]
    times[plans[0]] = None
    assert fastest(FakeBench(times.__getitem__), SHAPES[0], 1, 1) == plans[1]
    assert fastest(FakeBench(lambda plan: None), SHAPES[0], 1, 1) is None


def test_torch_wins_ties_and_leaves_a_gap_in_the_plans(tmp_path: Path) -> None:
    assert fastest(FakeBench(lambda plan: 10e-6), SHAPES[0], 1, 1) is None
    bench = FakeBench(lambda plan: 5e-6 if plan.tokens in (1, 32) else 20e-6)
    (plans,) = tune(SHAPES[:1], bench, file_in(tmp_path), silent).values()
    assert [(plan.least, plan.tokens) for plan in plans] == [(1, 1), (17, 32)]


def test_stored_plans_are_not_measured_again(tmp_path: Path) -> None:
    heard: Heard = []
    first = fast_up_to(16)
    table = tune(SHAPES, first, file_in(tmp_path), lambda *progress: heard.append(progress))
    assert heard == [(PHASE, done, 8) for done in range(9)]
    assert first.measured == [(shape, tokens) for shape in SHAPES for _, tokens in CLASSES]
    second = FakeBench()
    heard.clear()
    again = tune(SHAPES, second, file_in(tmp_path), lambda *progress: heard.append(progress))
    assert (again, second.measured, heard) == (table, [], [])
    third = FakeBench()
    more = tune([SHAPES[0], (64, 64)], third, file_in(tmp_path), silent)
    assert more == table | {(64, 64): ()}
    assert {shape for shape, _ in third.measured} == {(64, 64)}
    assert file_in(tmp_path).read() == more


def test_the_file_names_its_machine(tmp_path: Path) -> None:
    file = file_in(tmp_path)
    tune(SHAPES[:1], fast_up_to(1), file, silent)
    assert file.path == tmp_path / "tuned" / "Some-GPU-9000-rev-2--torch-2.11.0+cu130-triton-3.6.0.json"
    content = msgspec.json.decode(file.path.read_bytes())
    assert content["machine"] == {"gpu": MACHINE.gpu, "torch": MACHINE.torch, "triton": MACHINE.triton}
    (entry,) = content["linear"]
    assert (entry["outputs"], entry["inputs"]) == SHAPES[0]
    assert entry["plans"][0]["vector"] is True
    assert {path.suffix for path in file.path.parent.iterdir()} == {".json", ".lock"}


def changed(content: dict[str, object], **fields: object) -> bytes:
    return msgspec.json.encode(content | fields)


def replaced(content: dict[str, object], old: bytes, new: bytes) -> bytes:
    return msgspec.json.encode(content).replace(old, new)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda content: b"", "truncated"),
        (lambda content: msgspec.json.encode(content)[:-20], "truncated"),
        (lambda content: b"\xff\xfe", "malformed"),
        (lambda content: changed(content, format=0), "its format is 0"),
        (
            lambda content: changed(content, machine={"gpu": "A", "torch": "1", "triton": "1"}),
            "other versions: Machine(gpu='A'",
        ),
        (lambda content: changed(content, linear=[{"outputs": 4096}]), "missing required field"),
        (lambda content: msgspec.json.encode(content).replace(b'"rows":4,', b'"rows":3,'), "rows=3"),
        (
            lambda content: msgspec.json.encode(content).replace(b'"rows":4,', b'"rows":"4",'),
            "Expected `int`",
        ),
    ],
)
def test_an_invalid_file_is_replaced(
    spoil: Callable[[dict[str, object]], bytes],
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = file_in(tmp_path)
    table = tune(SHAPES, fast_up_to(64), file, silent)
    file.path.write_bytes(spoil(msgspec.json.decode(file.path.read_bytes())))
    bench = fast_up_to(64)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "atom"):
        assert tune(SHAPES, bench, file, silent) == table
    assert len(bench.measured) == len(SHAPES) * len(CLASSES)
    assert str(file.path) in caplog.messages[0] and reason in caplog.messages[0]
    assert file.read() == table


def test_other_versions_have_files_of_their_own(tmp_path: Path) -> None:
    tune(SHAPES, fast_up_to(64), file_in(tmp_path), silent)
    newer = msgspec.structs.replace(MACHINE, triton="3.9.0")
    assert file_in(tmp_path, newer).read() == {}


def test_without_a_usable_directory_nothing_is_measured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tuned").write_text("a file in the way")
    bench = fast_up_to(64)
    with caplog.at_level(logging.WARNING, "atom"):
        assert tune(SHAPES, bench, file_in(tmp_path), silent) == {}
    assert bench.measured == [] and "ATOM_CACHE_DIR" in caplog.text


def test_finished_shapes_survive_a_later_failure(tmp_path: Path) -> None:
    class Failing(FakeBench):
        def stopwatch(self, plan: LinearPlan | None, shape: Shape, tokens: int) -> Callable[[int], float]:
            if shape == SHAPES[1]:
                raise RuntimeError("the GPU is gone")
            return super().stopwatch(plan, shape, tokens)

    with pytest.raises(RuntimeError, match="the GPU is gone"):
        tune(SHAPES, Failing(), file_in(tmp_path), silent)
    assert file_in(tmp_path).read().keys() == {SHAPES[0]}
    assert tune(SHAPES, FakeBench(), file_in(tmp_path), silent).keys() == set(SHAPES)


def _tune_elsewhere(directory: Path, notes: Path) -> None:
    class Slow(FakeBench):
        def valid_plans(self, plans: Sequence[LinearPlan], shape: Shape) -> list[LinearPlan]:
            time.sleep(0.1)
            return super().valid_plans(plans, shape)

    bench, heard = Slow(lambda plan: 5e-6), Heard()
    table = tune(SHAPES, bench, file_in(directory), lambda *progress: heard.append(progress))
    sizes = sorted((*shape, len(plans)) for shape, plans in table.items())
    note = msgspec.json.encode((len(bench.measured), sizes, heard))
    (notes / str(os.getpid())).write_bytes(note)


def test_two_workers_measure_once_and_both_see_the_progress(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_tune_elsewhere, args=(tmp_path, notes)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(DEADLINE_S)
        assert worker.exitcode == 0
    found = [msgspec.json.decode(path.read_bytes()) for path in notes.iterdir()]
    assert sorted(measured for measured, *_ in found) == [0, len(SHAPES) * len(CLASSES)]
    assert found[0][1] == found[1][1] == sorted([*shape, len(CLASSES)] for shape in SHAPES)
    assert all(total == 8 for *_, heard in found for _, _, total in heard)


def test_waiting_for_the_lock_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[None] = []
    clock = itertools.count(0.0, 0.1)  # each look at it is later
    own_time = SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda seconds: None)
    monkeypatch.setattr(file_lock, "time", own_time)
    with (
        exclusive(tmp_path / "lock", 1.0, lambda: None),
        pytest.raises(TimeoutError, match="lock is still locked after 0 s"),
        exclusive(tmp_path / "lock", 0.3, lambda: waits.append(None)),
    ):
        raise AssertionError("two hold one lock")
    assert len(waits) >= 2
    with exclusive(tmp_path / "lock", 0.0, lambda: None):
        pass


def test_weights_are_listed_once_and_only_half_precision() -> None:
    tied, other = (torch.zeros(8, 4, dtype=torch.bfloat16) for _ in range(2))
    rest = [torch.zeros(8, 4), torch.zeros(4, 8, dtype=torch.bfloat16).T, torch.zeros(8, dtype=torch.half)]
    assert by_shape([tied, other, tied, *rest]) == {(8, 4): [tied, other]}


@pytest.mark.parametrize("format", ["fp8-block", "int8-channel", "int4-128", "mxfp4"])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 12288), (1024, 3072)])
def test_candidates_of_quantized_weights(format: str, outputs: int, inputs: int) -> None:
    key = (format, outputs, inputs)
    for least, tokens in classes_of(key):
        plans = candidates(key, least, tokens)
        assert 2 <= len(plans) <= 32 and len(set(plans)) == len(plans)
        assert {plan.tokens for plan in plans} == {tokens}
        assert all(is_candidate(key, plan) for plan in plans)


def test_plans_of_quantized_weights_are_stored_and_need_not_beat_torch(tmp_path: Path) -> None:
    key = ("fp8-block", 6144, 4096)
    bench = FakeBench()
    keys: list[Key] = [key, SHAPES[0]]
    table = tune(keys, bench, file_in(tmp_path), silent)
    assert [plan.tokens for plan in table[key]] == [most for _, most in classes_of(key)]
    assert {shape for shape, _ in bench.measured} == {SHAPES[0]}
    assert table[SHAPES[0]] == ()
    assert file_in(tmp_path).read() == table
    none = FakeBench(lambda plan: None)
    assert tune([("mxfp4", 4096, 4096)], none, file_in(tmp_path), silent)["mxfp4", 4096, 4096] == ()


@pytest.mark.parametrize("key", [*H200.quantized, ("fp8-block", 1000, 200), ("mxfp4", 70, 96)], ids=str)
def test_plans_of_quantized_weights_cover_every_number_of_tokens(key: QuantizedKey) -> None:
    """Also where there is no library: for float16."""
    plans = with_general(key, H200.quantized.get(key, ()))
    assert [plan.tokens for plan in plans] == sorted(plan.tokens for plan in plans)
    assert plans[0].tokens <= 8 and plans[-1].tokens == MANY
    assert isinstance(plans[-1], GemmPlan)


def test_nothing_is_tuned_on_a_cpu(tmp_path: Path) -> None:
    backend.resolve(torch.device("cpu"))
    weights = [torch.zeros(64, 64, dtype=torch.bfloat16)]
    backend.tune(torch.device("cpu"), weights, tmp_path, silent)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_tuned_for_batch_invariance(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    triton_impl.load()
    linear.use([backend.BATCH_INVARIANT])
    weights = [torch.zeros(64, 64, dtype=torch.bfloat16)]
    backend.tune(torch.device("cuda", 0), weights, tmp_path, silent)
    assert list(tmp_path.iterdir()) == []
    backend.resolve(torch.device("cpu"))


def test_linear_uses_measured_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = pytest.importorskip("atom_ops.triton_impl.plans.bench", reason="needs triton")
    fake, gpu = fast_up_to(16), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(bench, "GPUBench", lambda weights: fake)
    bench.plans_on.cache_clear()
    weights = [torch.zeros(64, 128, dtype=torch.bfloat16)]
    for _ in range(2):
        bench.tune_linear(gpu, weights, tmp_path, silent)
        (plans,) = bench.plans_on(gpu).values()
        assert [(plan.least, plan.tokens) for plan in plans] == [(1, 1), (2, 16)]
        bench.plans_on.cache_clear()
    assert len(fake.measured) == len(CLASSES)
    (file,) = (tmp_path / "tuned").glob("Some-GPU-*.json")
    assert torch.__version__ in file.name


def test_valid_plans() -> None:
    bench = pytest.importorskip("atom_ops.triton_impl.plans.bench", reason="needs triton")
    weight = torch.randn(32, 64).mul_(1 / 8).half()
    plan = LinearPlan(16, False, 16, 64, 4, 2, least=2)

    def right(plan: LinearPlan, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear.reference(x, weight, bias)

    def wrong_for_many(plan: LinearPlan, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return right(plan, x, weight, bias) + (0.1 if len(x) > 2 else 0.0)

    def not_a_number(plan: LinearPlan, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return right(plan, x, weight, bias) * float("nan")

    def too_large(plan: LinearPlan, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise bench.TritonError("out of resource: shared memory")

    def no_memory(plan: LinearPlan, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise torch.OutOfMemoryError("none left")

    assert bench.runs(right, plan, weight) and bench.matches_torch(right, plan, weight)
    assert not bench.matches_torch(wrong_for_many, plan, weight)
    assert not bench.matches_torch(not_a_number, plan, weight)
    assert not bench.runs(too_large, plan, weight)
    with pytest.raises(torch.OutOfMemoryError):
        bench.runs(no_memory, plan, weight)


@pytest.mark.parametrize("format", ["mxfp4", "int4"])
@pytest.mark.parametrize("shape", [(32, 2880, 2880), (384, 7168, 2048), (128, 2880, 1440)], ids=str)
def test_plans_of_four_bit_experts(format: expert_plans.Format, shape: expert_plans.Shape) -> None:
    """Kernels in Gluon where they fit the weights, and never elsewhere; tiles are powers of two."""
    layer = format, shape
    measured = H200.experts.get(layer, ())
    for tokens in (1, 2, 3, 17, 64, 300, 1 << 16):
        for gluon in ((), (expert_plans.WgmmaPlan,), expert_plans.GLUON):
            plan = expert_plans.tuned_plan(measured, tokens, gluon)
            plan = plan or expert_plans.default_plan(layer, tokens, 4, hopper=True, gluon=gluon)
            assert tokens <= plan.tokens
            if tokens > 2:
                decoded_first = len(gluon) == 2 and tokens * 4 > 900 * shape[0]
                wanted = expert_plans.PersistentPlan if decoded_first else gluon[:1]
                assert isinstance(plan, wanted) or not (gluon or isinstance(plan, expert_plans.GLUON))
            if isinstance(plan, expert_plans.WgmmaPlan):
                assert 8 <= plan.short <= plan.block <= 64
                assert plan.short.bit_count() == plan.block.bit_count() == 1
        elsewhere = expert_plans.default_plan(layer, tokens, 4, hopper=False)
        assert not isinstance(elsewhere, expert_plans.WgmmaPlan)


@pytest.mark.parametrize("shape", [(128, 2048, 768), (8, 4096, 14336)], ids=str)
def test_plans_of_plain_experts(shape: expert_plans.Shape) -> None:
    """Persistent programs for many tokens, where they fit the weights."""
    layer: expert_plans.Layer = "plain", shape
    measured = H200.experts.get(layer, ())
    for tokens in (1, 64, 1 << 14, 1 << 16):
        for gluon in ((), expert_plans.GLUON):
            plan = expert_plans.tuned_plan(measured, tokens, gluon)
            plan = plan or expert_plans.default_plan(layer, tokens, 2, hopper=True, gluon=gluon)
            assert tokens <= plan.tokens
            many = bool(gluon) and tokens >= 1 << 14
            assert isinstance(plan, expert_plans.PersistentPlan) == many
