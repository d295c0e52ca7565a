"""Measures the tiles of `experts` on a Hopper GPU, for the shipped plans.

    make tune-experts ARGS="--models Qwen3-30B-A3B --tokens 1 64 4096"

Every GEMM is timed alone, with random experts and cold weights, from a graph. For each number of tokens
the fastest tiles are printed, then the time of the whole op by the fastest plan of each kind, of its
parts, and of torch. The floor is that of an H200.
"""

import argparse
import itertools
import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

from atom_ops import RoutingRule, backend, route
from atom_ops.ops.experts.experts import ClampedSwiglu, ExpertWeights, experts
from atom_ops.triton_impl.experts import experts as provider
from atom_ops.triton_impl.experts import hopper_experts
from atom_ops.triton_impl.experts.expert_blocks import ExpertBlocks, sort_by_expert
from atom_ops.triton_impl.experts.expert_plans import (
    MANY,
    ExpertPlan,
    Format,
    GroupedPlan,
    GroupedTile,
    PersistentPlan,
    VectorPlan,
    VectorTile,
    WgmmaPlan,
)
from atom_ops.triton_impl.experts.expert_quantized import QuantizedGEMMs, Rounded, rounded
from atom_ops.weights import MXFP4, BlockFP8, ChannelFP8, ChannelINT8, GroupINT4, Weight, tensors_of
from atom_ops.weights.four_bit_words import pack_words

DTYPE = torch.bfloat16
DEVICE = "cuda"
SHARED_BYTES = 227 << 10
READ_GB_S = 4475
MATMUL_TFLOP_S = 761
"""The memory rate of an H200, measured."""


@dataclass(frozen=True)
class Model:
    experts: int
    hidden: int
    features: int
    chosen: int
    biased: bool = False
    format: Format = "plain"


MODELS = {
    "Qwen3-30B-A3B": Model(128, 2048, 768, 8),
    "Qwen3-30B-A3B-FP8": Model(128, 2048, 768, 8, format="block_fp8"),
    "Qwen3-30B-A3B-PTPC": Model(128, 2048, 768, 8, format="channel_fp8"),
    "Qwen3-30B-A3B-INT8": Model(128, 2048, 768, 8, format="int8"),
    "GPT-OSS-20B": Model(32, 2880, 2880, 4, biased=True),
    "GPT-OSS-20B-MXFP4": Model(32, 2880, 2880, 4, biased=True, format="mxfp4"),
    "Kimi-K2-INT4": Model(384, 7168, 2048, 8, format="int4"),
    "DeepSeek-V4-Flash-MXFP4": Model(256, 4096, 2048, 6, format="mxfp4"),
    "DeepSeek-V2-Lite": Model(64, 2048, 1408, 6),
    "Mixtral-8x7B": Model(8, 4096, 14336, 2),
}
Tile = VectorTile | GroupedTile | WgmmaPlan


FOUR_BIT = ("mxfp4", "int4")
WGMMA = tuple(
    WgmmaPlan(MANY, block, short, chunks, 128 if block < 32 else 168)
    for block, short in ((8, 8), (16, 8), (32, 16), (64, 32))
    for chunks in (1, 2)
)
"""The plans of `expert_wgmma` to try, for both GEMMs."""


def grouped_tiles(block: int, gated: bool, format: Format) -> Iterator[GroupedTile]:
    """The tiles to try for blocks of `block` pairs."""
    if format != "plain":
        yield from quantized_tiles(block, gated, format)
        return
    if block < 64:
        sides = itertools.product((64, 128), (64, 128), (4,), (2, 3, 4, 5, 6))
    else:
        sides = itertools.product((64, 128) if gated else (128, 256), (64,), (4, 8), (3, 4))
    for rows, columns, warps, stages in sides:
        weight_rows = 2 * rows if gated else rows
        if warps == 4 and block * weight_rows > 128 * 128:
            continue  # spills
        stage = (block + weight_rows) * columns * 2
        if stage * stages > SHARED_BYTES or (block < 64 and stage * stages < 48 << 10):
            continue
        yield GroupedTile(rows, columns, warps, stages)
        if stages >= 3:
            yield GroupedTile(rows, columns, warps, stages, persistent=True)


def quantized_tiles(block: int, gated: bool, format: Format) -> Iterator[GroupedTile]:
    """The tiles to try, all of 128 columns."""
    four_bit = format in FOUR_BIT
    # Decoded 4-bit weights are a register operand, which Triton 3.6 multiplies wrongly with 8 warps.
    sides = itertools.product((32, 64, 128, 256), (2, 4) if four_bit else (4, 8), (2, 3, 4, 5))
    for rows, warps, stages in sides:
        weight_rows = 2 * rows if gated else rows
        if warps == 2 and weight_rows != 64:
            continue  # decoded weights of more rows spill
        stage = 128 * (2 * block + weight_rows // 2 if four_bit else block + weight_rows)
        if weight_rows > 256 or (block < 64 and rows < 16 * warps) or rows * block < warps * 256:
            continue
        if weight_rows * block > warps * 32 * 128:
            continue  # spills
        if stage * stages > SHARED_BYTES or (stages == 2 and not four_bit):
            continue
        if format == "block_fp8" and rows > 128:
            continue  # a tile has the scale of one block
        yield GroupedTile(rows, 128, warps, stages)
        if stages == 3 and (block >= 64 or warps == 4):
            yield GroupedTile(rows, 128, warps, stages, persistent=True)


def vector_tiles(model: Model, gated: bool) -> Iterator[VectorTile]:
    """The tiles to try; down's are as many times larger as a token has experts."""
    experts = 1 if gated else 1 << (model.chosen - 1).bit_length()
    if model.format in FOUR_BIT:
        for rows, warps, count in itertools.product((4, 8, 16, 32), (1, 2, 4), (3, 4, 6, 8)):
            if 16 * warps <= rows * (2 if gated else experts) <= 32 * warps:
                yield VectorTile(rows, 128, warps, count)
        return
    stages = (1, 3)
    if model.format == "plain":
        columns = (512, 1024, 2048) if gated else (64, 128, 256, 512)
        least = 16
        most = 64
    else:
        columns = (512, 1024, 2048) if gated else (128,)
        least, most = 16, 64
        stages = (1, 3) if gated else (1, 3, 5)
    for rows, column, warps in itertools.product((1, 2, 4, 8, 16), columns, (2, 4, 8)):
        if least <= rows * column * experts // (32 * warps) <= most:
            yield from (VectorTile(rows, column, warps, count) for count in stages)


class Layer:
    """The weights of a layer and the inputs of several calls."""

    def __init__(self, model: Model, tokens: int, calls: int, weights: ExpertWeights):
        self.model, self.tokens, self.weights = model, tokens, weights
        generator = torch.Generator(DEVICE).manual_seed(1)

        def random(*shape: int) -> Tensor:
            return torch.rand(shape, device=DEVICE, generator=generator)

        self.ids = [random(tokens, model.experts).topk(model.chosen).indices for _ in range(calls)]
        self.x = [(random(tokens, model.hidden) - 0.5).to(DTYPE) for _ in range(calls)]
        self.shares = random(tokens, model.chosen)
        self.activation = ClampedSwiglu(7.0, 1.702) if model.biased else None
        self.inner = (random(tokens * model.chosen, model.features) - 0.5).to(DTYPE)
        self.y = torch.empty(tokens * model.chosen, model.hidden, dtype=DTYPE, device=DEVICE)
        self._blocks: dict[int, list[ExpertBlocks]] = {}

    def call(self, plan: ExpertPlan) -> list[Callable[[], object]]:
        return [
            partial(provider.multiply, plan, x, ids, self.shares, self.weights, self.activation, True)
            for x, ids in zip(self.x, self.ids, strict=True)
        ]

    def reference(self) -> list[Callable[[], object]]:
        return [
            partial(experts.reference, x, ids, self.shares, self.weights, self.activation)
            for x, ids in zip(self.x, self.ids, strict=True)
        ]

    def gemm(
        self, block: int, tile: GroupedTile, gated: bool, group: int = 128
    ) -> list[Callable[[], object]]:
        """`group`: how many of down's inputs share a scale, if they are rounded."""
        blocks = self._blocks.setdefault(
            block, [sort_by_expert(ids, self.model.experts, block) for ids in self.ids]
        )
        plan = GroupedPlan(MANY, block, tile, tile)
        if self.model.format != "plain":
            return self._quantized_gemm(
                [QuantizedGEMMs(plan, one, self.model.chosen, True) for one in blocks], gated, group
            )
        steps = [provider.GroupedGEMMs(plan, one, self.model.chosen, True) for one in blocks]
        if not gated:
            return [partial(step.down, self.inner, self.weights, self.y) for step in steps]
        return [
            partial(step.gate_up, x, self.weights, self.activation, self.inner)
            for x, step in zip(self.x, steps, strict=True)
        ]

    def _quantized_gemm(
        self, steps: Sequence[QuantizedGEMMs], gated: bool, group: int
    ) -> list[Callable[[], object]]:
        inner = steps[0].inner(self.weights, self.inner)
        if gated:
            return [
                partial(step.gate_up, x, self.weights, self.activation, inner)
                for x, step in zip(self.x, steps, strict=True)
            ]
        given: Rounded | Tensor = self.inner
        if isinstance(inner, Rounded):
            codes = rounded(self.inner, inner.codes.dtype).codes
            shape = len(codes), -(-codes.shape[1] // group)
            given = Rounded(codes, torch.ones(shape, dtype=torch.float32, device=DEVICE), group)
        return [partial(step.down, given, self.weights, self.y) for step in steps]

    def vector(self, tile: VectorTile, gated: bool) -> list[Callable[[], object]]:
        """Timed with the other GEMM, whose time does not change."""
        down = VectorTile(4, 256 if self.model.format == "plain" else 128, 4)
        other = down if gated else VectorTile(4, 1024, 4)
        if self.model.format in FOUR_BIT:
            other = VectorTile(8, 128, 2, 4) if gated else VectorTile(16, 128, 2, 4)
        plan = VectorPlan(MANY, *((tile, other) if gated else (other, tile)))
        return self.call(plan)


def made_weights(model: Model, count: int) -> ExpertWeights:
    """The weights of `count` experts, random."""

    def random(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=DTYPE, device=DEVICE).uniform_(-0.03, 0.03)

    hidden, features = model.hidden, model.features
    biases = (random(count, 2 * features), random(count, hidden)) if model.biased else (None, None)
    shapes = ((count, 2 * features, hidden), (count, hidden, features))
    gate_up, down = (random_matrix(shape, model.format) for shape in shapes)
    return ExpertWeights(gate_up, down, *biases)


def random_matrix(shape: tuple[int, ...], format: Format) -> Weight:
    """With a standard deviation of about I^-0.5."""
    std = shape[-1] ** -0.5
    if format == "plain":
        return torch.empty(shape, dtype=DTYPE, device=DEVICE).normal_(std=std)
    if format in FOUR_BIT:
        return four_bit_matrix(shape, format, std)
    values = torch.empty(shape, dtype=torch.int8 if format == "int8" else torch.float8_e4m3fn, device=DEVICE)
    for part in values:
        part.copy_(torch.empty(part.shape, dtype=DTYPE, device=DEVICE).normal_(std=30))
    blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    scales = torch.rand(blocks if format == "block_fp8" else shape[:-1], device=DEVICE)
    scales = (scales + 0.5) * (std / 30)
    if format == "block_fp8":
        return BlockFP8(values, scales, (128, 128))
    return ChannelFP8(values, scales) if format == "channel_fp8" else ChannelINT8(values, scales)


def four_bit_matrix(shape: tuple[int, ...], format: Format, std: float) -> Weight:
    """As the kernels read it."""
    pairs, groups = (*shape[:-1], shape[-1] // 2), (*shape[:-1], shape[-1] // 32)
    codes = torch.randint(0, 256, pairs, dtype=torch.uint8, device=DEVICE)
    if format == "int4":
        scales = ((torch.rand(groups, device=DEVICE) + 0.5) * (std / 4.6)).to(DTYPE)
        packed = pack_words(GroupINT4(codes, scales))
    else:
        exponent = 127 + round(math.log2(std / 3))
        packed = pack_words(
            MXFP4(codes, torch.randint(exponent - 1, exponent + 1, groups, dtype=torch.uint8, device=DEVICE))
        )
    assert packed is not None
    return packed


def seconds(bodies: Sequence[Callable[[], object]], rounds: int = 7) -> float:
    """Median time of a call, replayed from a graph."""
    for body in bodies[:2]:
        body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [body() for body in bodies]
    graph.replay()
    times = []
    for _ in range(rounds):
        start, end = torch.Event("cuda", enable_timing=True), torch.Event("cuda", enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) / 1e3 / len(bodies))
    del kept
    return statistics.median(times)


def attempt(bodies: Callable[[], Sequence[Callable[[], object]]]) -> float:
    """Infinity for a tile that does not fit."""
    try:
        return seconds(bodies())
    except (TritonError, RuntimeError) as error:
        if isinstance(error, torch.AcceleratorError):
            raise
        return float("inf")


Job = tuple[str, int, Tile, bool]
"""Model, block (0: vector), tile, gated."""


def jobs_of(model: str, blocks: Sequence[int]) -> list[Job]:
    """The tiles to try for these blocks."""
    jobs: list[Job] = []
    format = MODELS[model].format
    for gated in (True, False):
        for block in blocks:
            if block:
                jobs += [(model, block, tile, gated) for tile in grouped_tiles(block, gated, format)]
            else:
                jobs += [(model, 0, tile, gated) for tile in vector_tiles(MODELS[model], gated)]
    if format in FOUR_BIT:
        jobs += [(model, 0, plan, True) for plan in WGMMA]
    return jobs


def blocks_for(model: Model, tokens: int) -> list[int]:
    """The blocks worth trying, by the pairs per expert on average."""
    per_expert = tokens * model.chosen / model.experts
    blocks = [0] if tokens <= 4 else []
    for block in (16, 32, 64, 128):
        if block / 16 <= max(per_expert, 1) and (per_expert <= 4 * block or block == 128):
            blocks.append(block)
    return blocks


def compile_jobs(jobs: Sequence[Job]) -> None:
    """Fill Triton's cache on disk: run each on few experts."""
    layers: dict[str, Layer] = {}
    for name, block, tile, gated in jobs:
        model = MODELS[name]
        if name not in layers:
            layers[name] = Layer(
                model, 128, 1, made_weights(model, model.experts if model.experts < 9 else 8)
            )
            layers[name].ids = [ids % 8 for ids in layers[name].ids]
        layer = layers[name]
        try:
            if isinstance(tile, WgmmaPlan):
                layer.call(tile)[0]()
            elif isinstance(tile, GroupedTile):
                layer.gemm(block, tile, gated)[0]()
            else:
                layer.vector(tile, gated)[0]()
        except (TritonError, RuntimeError):
            continue
    torch.cuda.synchronize()


def tune(name: str, all_tokens: Sequence[int]) -> None:
    """Print the fastest tiles and plans of a model."""
    model = MODELS[name]
    weights = made_weights(model, model.experts)
    for tokens in all_tokens:
        layer = Layer(model, tokens, 16 if tokens <= 16 else 6 if tokens <= 256 else 2, weights)
        active = statistics.mean(len(set(ids.flatten().tolist())) for ids in layer.ids)
        held = sum(
            part.nbytes for weight in (weights.gate_up_XOD, weights.down_XDF) for part in tensors_of(weight)
        )
        moved = active * held / model.experts + 4 * tokens * model.hidden
        flops = 6 * tokens * model.chosen * model.hidden * model.features
        floor = max(moved / READ_GB_S / 1e9, flops / MATMUL_TFLOP_S / 1e12)
        print(
            f"\n== {name}, {tokens} tokens: {active:.1f} of {model.experts} experts,"
            f" floor {floor * 1e6:.1f} us"
        )
        totals = []
        for block in blocks_for(model, tokens):
            jobs = jobs_of(name, [block])
            gate_up = fastest(layer, jobs, True, moved, flops)
            best: list[Any] = [gate_up, fastest(layer, jobs, False, moved, flops, gate_up.rows)]
            plan = GroupedPlan(tokens, block, *best) if block else VectorPlan(tokens, *best)
            totals.append((attempt(partial(layer.call, plan)), plan))
        whole: Sequence[ExpertPlan] = WGMMA if model.format in FOUR_BIT else ()
        if model.format == "plain" and hopper_experts.fits(layer.x[0], weights):
            whole = (PersistentPlan(tokens),)
        totals += [(attempt(partial(layer.call, plan)), plan) for plan in whole]
        for taken, plan in sorted(totals, key=lambda entry: entry[0]):
            print(f"  WHOLE {taken * 1e6:9.1f} us {floor / taken:6.1%} of the floor  {plan}")
        if model.format == "plain":
            print(f"  torch {attempt(layer.reference) * 1e6:9.1f} us")
        parts(layer)
        sys.stdout.flush()


def fastest(
    layer: Layer, jobs: Sequence[Job], gated: bool, moved: float, flops: float, group: int = 128
) -> Tile:
    """Print the four fastest tiles of a GEMM; `moved` bytes and `flops` are those of the whole op."""
    times = []
    for _, block, tile, of_gated in jobs:
        if isinstance(tile, WgmmaPlan):
            continue
        if of_gated == gated and isinstance(tile, VectorTile):
            times.append((attempt(partial(layer.vector, tile, gated)), block, tile))
        elif of_gated == gated:
            times.append((attempt(partial(layer.gemm, block, tile, gated, group)), block, tile))
    times.sort(key=lambda entry: entry[0])
    part = 2 / 3 if gated else 1 / 3
    for taken, block, tile in times[:4]:
        rate = f"{part * moved / taken / 1e9:6.0f} GB/s {part * flops / taken / 1e12:6.1f} TFLOP/s"
        gemm = f"block {block:3d} {'gate_up' if gated else 'down':8s}"
        print(f"  {gemm} {taken * 1e6:8.1f} us {rate} {tile}")
    return times[0][2]


def parts(layer: Layer) -> None:
    """The times of routing, sorting and the sum."""
    model, tokens = layer.model, layer.tokens
    logits = torch.randn(tokens, model.experts, device=DEVICE, dtype=DTYPE)
    rule = RoutingRule(model.chosen, "softmax", renormalise=True)
    routed = seconds([partial(route, logits, rule)] * 8)
    plain = seconds([partial(route.reference, logits, rule)] * 8)
    sorted_ = seconds([partial(sort_by_expert, ids, model.experts, 64) for ids in layer.ids])
    summed = seconds(
        [partial(provider.sum_pairs, layer.y, ids, layer.shares, model.experts) for ids in layer.ids]
    )
    print(
        f"  route {routed * 1e6:.1f} us (torch {plain * 1e6:.1f}), sort {sorted_ * 1e6:.1f} us,"
        f" sum {summed * 1e6:.1f} us"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 16, 64, 256, 4096])
    parser.add_argument("--processes", type=int, default=14, help="that compile; 0: none does, ahead")
    args = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        parser.error("needs a Hopper GPU: the tiles are loaded by tensor descriptors (TMA)")
    backend.resolve(torch.device(DEVICE))
    print(torch.cuda.get_device_name())
    began = time.monotonic()
    blocks = {
        name: sorted({block for tokens in args.tokens for block in blocks_for(MODELS[name], tokens)})
        for name in args.models
    }
    jobs = [job for name in args.models for job in jobs_of(name, blocks[name])]
    if args.processes:
        with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
            pool.map(compile_jobs, [jobs[i :: args.processes] for i in range(args.processes)], chunksize=1)
    print(f"{len(jobs)} tiles compiled in {time.monotonic() - began:.0f} s")
    for name in args.models:
        tune(name, args.tokens)
        torch.cuda.empty_cache()
    print(f"took {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
