"""Times GEMMs on a GPU as in a decode step: replayed from a graph, with weights not in the cache."""

import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from itertools import cycle, islice
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from atom.shared.utils.logger import get_logger
from atom_ops.ops.linear.linear import linear
from atom_ops.triton_impl.hardware.target import is_hopper
from atom_ops.triton_impl.linear import linear as plain_linear
from atom_ops.triton_impl.linear.linear import plans_on
from atom_ops.triton_impl.plans.linear_plans import LinearPlan, StreamKPlan
from atom_ops.triton_impl.plans.plan_file import Key, PlanFile
from atom_ops.triton_impl.plans.plan_format import Machine
from atom_ops.triton_impl.plans.tuning import AnyPlan, Progress, by_shape, is_candidate, tune
from atom_ops.triton_impl.quantized import known_plans, quantized_linear
from atom_ops.triton_impl.quantized.quantized_call import Packed
from atom_ops.triton_impl.quantized.quantized_plans import PersistentGemvPlan
from atom_ops.weights import FourBitWords, Weight, tensors_of

Multiply = Callable[[AnyPlan, Tensor, Tensor | Packed, Tensor | None], Tensor]

_COLD_BYTES = 512 << 20
"""Larger than any GPU's last-level cache: bytes read between two reads of a weight."""
_MOST_LAUNCHES = 64
_FEWEST_LAUNCHES = 4
_COMPILERS = min(8, os.cpu_count() or 1)
_SEED = 1
_ROUNDING = 0.05
"""Relative error of results; rounding activations to e4m3 gives 0.027."""


def multiply(plan: AnyPlan, x_TI: Tensor, weight: Tensor | Packed, bias: Tensor | None) -> Tensor:
    """`linear` by this plan."""
    if isinstance(weight, Tensor):
        return plain_linear.multiply(plan, x_TI, weight, bias)  # type: ignore[arg-type]
    return quantized_linear.multiply(plan, x_TI, weight, bias, x_TI.dtype)[0]  # type: ignore[arg-type]


def tune_linear(device: torch.device, weights: Iterable[Weight], cache_dir: Path, progress: Progress) -> None:
    """Measure plans of `linear` for these weights, unless all of their shapes have some."""
    plain = plans_on(device)
    quantized = known_plans.plans_on(device)
    built_in: set[Key] = {*plain, *quantized}
    shapes = {shape: found for shape, found in by_shape(weights).items() if shape not in built_in}
    if not shapes:
        return
    machine = Machine(torch.cuda.get_device_name(device), str(torch.__version__), triton.__version__)
    file = PlanFile(cache_dir, machine, is_candidate)
    with torch.cuda.device(device):
        measured = tune(list(shapes), GPUBench(shapes), file, progress)
        for shape in shapes:
            if shape in measured and len(shape) == 2:
                plain[shape] = measured[shape]  # type: ignore[assignment]
            elif shape in measured:
                known_plans.add_plans(device, {shape: measured[shape]})  # type: ignore[dict-item]
        torch.cuda.empty_cache()


class GPUBench:
    """Measures on the current GPU, which must be otherwise idle."""

    def __init__(
        self, weights: Mapping[Key, Sequence[Tensor | Packed]], multiply: Multiply = multiply
    ) -> None:
        self._weights = weights
        self._multiply = multiply
        self._stream = torch.cuda.Stream()
        self._cold: tuple[Key, list[Tensor | Packed]] | None = None

    def valid_plans(self, plans: Sequence[AnyPlan], shape: Key) -> list[AnyPlan]:
        """The plans that run and match torch; compiles several at a time."""
        weight = self._weights[shape][0]
        with ThreadPoolExecutor(_COMPILERS) as pool:
            ran = pool.map(lambda plan: runs(self._multiply, plan, weight), plans)
            runnable = [plan for plan, works in zip(plans, ran, strict=True) if works]
        return [plan for plan in runnable if matches_torch(self._multiply, plan, weight)]

    def stopwatch(self, plan: AnyPlan | None, shape: Key, tokens: int) -> "_Stopwatch":
        """Captures a graph of enough launches to time, each with a weight that is not cached."""
        cold = self._cold_weights(shape)
        weights = list(islice(cycle(cold), max(len(cold), _FEWEST_LAUNCHES)))
        x_TI = tokens_for(weights[0], tokens)

        def body() -> None:
            for weight in weights:
                if plan is None:
                    linear.reference(x_TI, weight)
                else:
                    self._multiply(plan, x_TI, weight, None)

        return _Stopwatch(self._capture(body), x_TI, weights)

    def _capture(self, body: Callable[[], None]) -> torch.cuda.CUDAGraph:
        body()  # compiles kernels and initialises libraries
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                body()
            finally:
                graph.capture_end()
        return graph

    def _cold_weights(self, shape: Key) -> list[Tensor | Packed]:
        """The model's weights of this shape, and copies if they are too few to fill the caches."""
        if self._cold is None or self._cold[0] != shape:
            self._cold = None
            weights = self._weights[shape]
            size = sum(part.numel() * part.element_size() for part in tensors_of(weights[0]))
            room = torch.cuda.mem_get_info()[0] // (4 * size)
            count = min(-(-_COLD_BYTES // size), _MOST_LAUNCHES, len(weights) + room)
            copies = [_copy(weights[0]) for _ in range(count - len(weights))]
            self._cold = shape, [*weights[:count], *copies]
        return self._cold[1]


@dataclass(frozen=True)
class _Stopwatch:
    graph: torch.cuda.CUDAGraph
    x_TI: Tensor
    """Held, like the weights, because the graph reads it without a reference."""
    weights: Sequence[Tensor | Packed]

    def __call__(self, rounds: int) -> float:
        """Seconds for one GEMM: the median of `rounds` replays."""
        starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(rounds)] for _ in range(2))
        self.graph.replay()
        for start, end in zip(starts, ends, strict=True):
            start.record()
            self.graph.replay()
            end.record()
        torch.cuda.synchronize()
        milliseconds = statistics.median(map(torch.cuda.Event.elapsed_time, starts, ends))
        return milliseconds / 1000 / len(self.weights)


def _copy(weight: Tensor | Packed) -> Tensor | Packed:
    if isinstance(weight, Tensor):
        return weight.clone()
    parts = {field.name: getattr(weight, field.name) for field in fields(weight)}
    copies = {name: part.clone() for name, part in parts.items() if isinstance(part, Tensor)}
    return replace(weight, **copies)  # type: ignore[arg-type]


def _device_of(weight: Tensor | Packed) -> torch.device:
    return next(tensors_of(weight)).device


def tokens_for(weight: Tensor | Packed, tokens: int) -> Tensor:
    """[T, I], the same values at every call; of bfloat16 for a quantized weight."""
    device = _device_of(weight)
    generator = torch.Generator(device).manual_seed(_SEED)
    dtype = weight.dtype if isinstance(weight, Tensor) else torch.bfloat16
    return torch.randn(tokens, weight.shape[1], generator=generator, device=device, dtype=dtype)


def runs(multiply: Multiply, plan: AnyPlan, weight: Tensor | Packed) -> bool:
    """Whether the plan compiles and launches; it may need another GPU, or more shared memory than it has."""
    device = _device_of(weight)
    if isinstance(plan, StreamKPlan) and not (is_hopper(device) and _has_descriptor(weight)):
        return False
    if isinstance(plan, PersistentGemvPlan) and not is_hopper(device):
        return False
    bfloat16 = torch.bfloat16
    if isinstance(weight, FourBitWords) and not plan.takes(weight, bfloat16, bfloat16):  # type: ignore[union-attr]
        return False
    try:
        with torch.cuda.device(device if device.type == "cuda" else -1):  # threads start on the first GPU
            multiply(plan, tokens_for(weight, plan.tokens), weight, None)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except (TritonError, RuntimeError) as error:
        get_logger().debug("%s does not run on %s: %s", plan, device, error)
        return False
    return True


def _has_descriptor(weight: Tensor | Packed) -> bool:
    """Whether the rows of the weight and of its activations begin at multiples of 16 bytes, as TMA needs."""
    size = weight.element_size() if isinstance(weight, Tensor) else 1
    return weight.shape[1] * size % 16 == 0


def matches_torch(multiply: Multiply, plan: AnyPlan, weight: Tensor | Packed) -> bool:
    """Whether results equal torch's within the op's tolerance, for the fewest and the most tokens."""
    if not isinstance(weight, Tensor):
        return _near_torch(multiply, plan, weight)
    tolerance = linear.tolerances[weight.dtype]
    assert isinstance(plan, LinearPlan | StreamKPlan)
    for tokens in (plan.least, plan.tokens):
        x_TI = tokens_for(weight, tokens)
        found = multiply(plan, x_TI, weight, None)
        wanted = linear.reference(x_TI, weight)
        if not torch.allclose(found, wanted, rtol=tolerance.relative, atol=tolerance.absolute):
            get_logger().warning("%s is wrong for a weight of %s: not used", plan, tuple(weight.shape))
            return False
    return True


def _near_torch(multiply: Multiply, plan: AnyPlan, weight: Packed) -> bool:
    """The same for a quantized weight: activations may be rounded to 8 bits."""
    x_TI = tokens_for(weight, plan.tokens)
    wanted = linear.reference(x_TI, weight)
    error = float((multiply(plan, x_TI, weight, None) - wanted).norm() / wanted.norm())
    if not error < _ROUNDING:
        get_logger().warning("%s is wrong by %.3f for a weight of %s: not used", plan, error, weight.shape)
        return False
    return True
