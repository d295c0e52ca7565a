"""Measures the plans of `linear` with quantized weights, for the table in `quantized_plans`.

    make tune-quantized ARGS="--models Qwen3-8B --formats fp8-block int4-128 --tokens 1 64 256"

Every plan is checked against the reference first, then timed alone, with its rounding of the activations,
cold weights, from a graph. For each shape and number of tokens the fastest plans are printed, next to a
plain GEMM in bfloat16 and torch._scaled_mm with activations that were rounded before.
"""

import argparse
import itertools
import multiprocessing
import sys
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from triton.errors import TritonError

from atom_ops import backend
from atom_ops.triton_impl.plans.linear_plans import StreamKPlan
from atom_ops.triton_impl.quantized import library
from atom_ops.triton_impl.quantized import quantized_linear as provider
from atom_ops.triton_impl.quantized.quantized_call import Packed
from atom_ops.triton_impl.quantized.quantized_candidates import candidates
from atom_ops.triton_impl.quantized.quantized_plans import (
    GemmPlan,
    GemvPlan,
    PersistentGemvPlan,
    QuantizedPlan,
)
from atom_ops.triton_impl.quantized.rounded_rows import round_rows
from atom_ops.weights import MXFP4, BlockFP8, ChannelFP8, ChannelINT8, FourBitWords, GroupINT4
from tools.tune_experts import seconds

DTYPE = torch.bfloat16
DEVICE = "cuda"
COLD_BYTES = 256 << 20
MODELS = {
    # (outputs, inputs) of the linear layers.
    "Qwen3-8B": ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)),
    "Qwen3-0.6B": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
    "Llama-3.1-8B": ((28672, 4096), (4096, 14336)),
}
FORMATS = ("fp8-block", "fp8-channel", "int8-channel", "int4-128", "int4-32", "mxfp4")
BEST = 3
WRONG = 0.05
"""Relative error, in the norm, above which a plan is wrong: rounding to e4m3 gives 0.027."""


def made_weight(format: str, outputs: int, inputs: int) -> Packed:
    """Random, with a variance of about 1 / I."""
    std = inputs**-0.5

    def codes(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)

    def spread(*shape: int) -> Tensor:
        return torch.rand(shape, device=DEVICE) + 0.5

    if format == "mxfp4":
        exponents = torch.randint(118, 121, (outputs, inputs // 32), dtype=torch.uint8, device=DEVICE)
        return in_words(MXFP4(codes(outputs, inputs // 2), exponents))
    if format.startswith("int4"):
        group = int(format.split("-")[1])
        scales = (spread(outputs, inputs // group) * std / 4.6).to(DTYPE)
        return in_words(GroupINT4(codes(outputs, inputs // 2), scales))
    values = torch.randn(outputs, inputs, device=DEVICE)
    if format == "int8-channel":
        return ChannelINT8((values * 30).round().clamp(-127, 127).to(torch.int8), spread(outputs) * std / 30)
    values = (values * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    if format == "fp8-channel":
        return ChannelFP8(values, spread(outputs) * std / 100)
    scales = spread(-(-outputs // 128), -(-inputs // 128)) * std / 100
    return BlockFP8(values, scales, (128, 128))


def in_words(weight: GroupINT4 | MXFP4) -> FourBitWords:
    packed = provider.packed(weight)
    if packed is None:
        raise ValueError("the 4-bit kernels do not run on this GPU, or do not read this weight")
    return packed


def call(plan: QuantizedPlan, x: Tensor, weight: Packed) -> Tensor:
    return provider.multiply(plan, x, weight, None, DTYPE)[0]


Job = tuple[str, int, int, int, QuantizedPlan]


def jobs_of(formats: Sequence[str], shapes: Sequence[tuple[int, int]], tokens: Sequence[int]) -> list[Job]:
    """Format, outputs, inputs, tokens and plan of every measurement."""
    found: list[Job] = []
    for format, (outputs, inputs), count in itertools.product(formats, shapes, tokens):
        found += [
            (format, outputs, inputs, count, plan) for plan in candidates((format, outputs, inputs), count)
        ]
    return found


def compile_jobs(jobs: Sequence[Job]) -> None:
    """Fill Triton's cache on disk: run each once."""
    weights: dict[tuple[str, int, int], Packed] = {}
    for format, outputs, inputs, tokens, plan in jobs:
        key = format, outputs, inputs
        if key not in weights:
            weights = {key: made_weight(*key)}
        try:
            call(plan, torch.zeros(tokens, inputs, dtype=DTYPE, device=DEVICE), weights[key])
        except (TritonError, RuntimeError):
            continue
    torch.cuda.synchronize()


def unlike(jobs: Sequence[Job]) -> list[Job]:
    """One job for each kernel that is compiled."""
    seen: dict[object, Job] = {}
    for job in jobs:
        format, outputs, inputs, tokens, plan = job
        if isinstance(plan, GemvPlan):
            seen.setdefault((format, inputs, plan), job)
        elif isinstance(plan, GemmPlan):
            fetched = outputs * inputs <= 32 << 20
            kernel = plan.tile, plan.rows, plan.columns, plan.warps, plan.stages, plan.split_k > 1, fetched
            seen.setdefault((format, kernel), job)
            seen.setdefault((format, inputs, tokens > 16), job)  # the rounding of the rows
        elif isinstance(plan, StreamKPlan | PersistentGemvPlan):
            seen.setdefault(job, job)
    return list(seen.values())


def measure(format: str, outputs: int, inputs: int, all_tokens: Sequence[int], whole: bool) -> None:
    """Print the fastest plans of a shape."""
    size = made_weight(format, 128, inputs)
    each = sum(part.numel() * part.element_size() for part in (size.scales, first_of(size))) * outputs // 128
    copies = max(2, min(COLD_BYTES // each, 24))
    weights = [made_weight(format, outputs, inputs) for _ in range(copies)]
    plain = [weight.dequantized(DTYPE) for weight in weights[: max(2, copies // 2)]]
    for tokens in all_tokens:
        x = torch.randn(tokens, inputs, device=DEVICE, dtype=DTYPE)
        some = weights if tokens <= 512 else weights[:2]
        wanted = (x[-64:].float() @ plain[0].float().T).double()
        rows: list[tuple[float, float, object]] = []
        for plan in candidates((format, outputs, inputs), tokens):
            try:
                found = call(plan, x, weights[0])[-64:].double()
                error = float((found - wanted).norm() / wanted.norm())
                rows.append((seconds([partial(call, plan, x, weight) for weight in some]), error, plan))
            except (TritonError, RuntimeError) as problem:
                if isinstance(problem, torch.AcceleratorError):
                    raise
                print(f"  {plan} does not run: {str(problem)[:160]!r}")
        rows.sort(key=lambda row: row[0])
        others = [partial(torch.nn.functional.linear, x, weight) for weight in plain]
        line = f"bf16 {seconds(others) * 1e6:.1f} us"
        if isinstance(weights[0], BlockFP8 | ChannelFP8) and tokens >= 16:
            group = 128 if isinstance(weights[0], BlockFP8) else 0
            rounded = round_rows(x, "e4m3", 16, group=group)[0]
            alone = [partial(library.scaled_mm, rounded, tokens, weight, None) for weight in some]
            line += f", _scaled_mm alone {seconds(alone) * 1e6:.1f} us"
        print(f"{format} {outputs}x{inputs} T={tokens}: {line}")
        for taken, error, plan in rows if whole else rows[:BEST] + rows[-1:]:
            rate = (
                f"{each / taken / 1e9:6.0f} GB/s {2 * tokens * outputs * inputs / taken / 1e12:7.1f} TFLOP/s"
            )
            print(f"  {taken * 1e6:9.2f} us {rate} error {error:.4f} {plan}")
        for _, error, plan in rows:
            if not error < WRONG:
                print(f"  WRONG by {error:.3f}: {plan}")
        sys.stdout.flush()


def first_of(weight: Packed) -> Tensor:
    """The tensor of the words or values."""
    return weight.words if isinstance(weight, FourBitWords) else weight.values


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["Qwen3-8B"])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 64, 256, 1024, 8192])
    parser.add_argument("--processes", type=int, default=14, help="that compile")
    parser.add_argument("--all", action="store_true", help="print every plan")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a GPU")
    backend.resolve(torch.device(DEVICE))
    print(torch.cuda.get_device_name())
    began = time.monotonic()
    shapes = [shape for name in args.models for shape in MODELS[name]]
    jobs = sorted(unlike(jobs_of(args.formats, shapes, args.tokens)), key=lambda job: job[:4])
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        pool.map(compile_jobs, [jobs[i :: args.processes] for i in range(args.processes)], chunksize=1)
    print(f"{len(jobs)} kernels compiled in {time.monotonic() - began:.0f} s")
    for format in args.formats:
        for outputs, inputs in shapes:
            measure(format, outputs, inputs, args.tokens, args.all)
            torch.cuda.empty_cache()
    print(f"took {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
