"""Every kernel compiles for the GPUs it supports, without such a GPU: the shapes of three models.

The plans are those that a provider chooses by default; on AMD none may spill registers to memory.
"""

import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from atom_ops import triton_impl
from atom_ops.op import REGISTRY, Case
from atom_ops.ops.attention.attention import AttentionRule
from atom_ops.ops.attention.attention_plan import BATCH_INVARIANT_SPLIT, AttentionPlan
from atom_ops.ops.attention.kv_cache import FP8, make_kv_layer
from atom_ops.ops.attention.qkv import HeadNorms
from atom_ops.ops.experts.experts import ClampedSwiglu, ExpertWeights
from atom_ops.ops.latent.compressed_rows import CachedRows, rows_of_block
from atom_ops.ops.latent.index_keys import IndexNorm, make_index_keys
from atom_ops.ops.latent.latent_cache import LatentNorms, make_latent_layer
from atom_ops.ops.latent.sparse_attention import TopKIndices
from atom_ops.ops.linear.linear import BATCH_INVARIANT
from atom_ops.ops.sampling.token_shard import TokenShard
from atom_ops.triton_impl.hardware import target
from atom_ops.weights import BlockFP8, ChannelFP8, ChannelINT8, FourBitWords
from tests.helpers.kernels.chips import CHIPS, Compiled, compiling_for
from tests.helpers.kernels.kernel_table import COMPILED, launched, record
from tests.helpers.kernels.op_cases import changed

pytestmark = [
    pytest.mark.compile,
    pytest.mark.timeout(1800),  # hundreds of compilations
    # Triton 3.9 warns at each compilation that its default will change.
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset"),
    pytest.mark.skipif(
        target.INTERPRETED or find_spec("triton") is None, reason="needs triton, not interpreted"
    ),
]

META = torch.device("meta")
BF16 = torch.bfloat16
MODELS = {
    # Query heads, key/value heads, width of a head, hidden size, half of a gated projection, with norms.
    "Qwen3-0.6B": (16, 8, 128, 1024, 3072, True),
    "Qwen3-8B": (32, 8, 128, 4096, 12288, True),
    "Llama-3.1-8B": (32, 8, 128, 4096, 14336, False),
}
NVIDIA_ONLY = (
    "all_reduce", "eight_bit_linear", "four_bit_gemv", "four_bit_linear", "four_bit_mma",
    "four_bit_ring", "four_bit_split_k", "four_bit_wgmma", "expert_wgmma", "fused_linear",
    "gathered_contexts", "hopper_attention", "hopper_decode", "hopper_experts", "hopper_gemv",
    "hopper_linear", "quantized_gemv", "query_tiles", "received_rows", "rounded_rows",
)  # fmt: skip
"""Modules whose kernels no provider launches on AMD."""
chips = pytest.mark.parametrize("chip", list(CHIPS))


def run(op: str, *args: Any, **settings: Any) -> None:
    REGISTRY[op].providers["triton"].function(*args, **settings)


def tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return tensor(*shape, dtype=dtype)


def small_kernels(model: str, tokens: int) -> None:
    heads, kv_heads, width, hidden, half, with_norms = MODELS[model]
    x, weight = tensor(tokens, hidden), tensor(hidden)
    run("embedding", ints(tokens, dtype=torch.int64), tensor(151936, hidden), 0)
    run("rms_norm", x, weight, 1e-6)
    run("add_rms_norm", x, x, weight, 1e-6)
    run("silu_and_mul", tensor(tokens, 2 * half))
    run("rotation_at", tensor(8192, width, dtype=torch.float32), ints(tokens, dtype=torch.int64))
    cos, sin = tensor(2, tokens, 1, width, dtype=torch.float32)
    norms = HeadNorms(tensor(width), tensor(width), 1e-6) if with_norms else None
    qkv, slots = tensor(tokens, (heads + 2 * kv_heads) * width), ints(tokens, dtype=torch.int64)
    for dtype in (BF16, FP8):
        cache = make_kv_layer(64, 16, kv_heads, width, dtype, META)
        run("rotate_and_write_kv", qkv, cos, sin, cache, slots, norms)
        run("rotate_and_write_kv", qkv, cos[..., : width // 2], sin[..., : width // 2], cache, slots, norms)
        run("write_kv", tensor(tokens, kv_heads, width), tensor(tokens, kv_heads, width), cache, slots)


def attention(heads: int, kv_heads: int, width: int, rule: AttentionRule, split_tokens: int) -> None:
    for dtype in (BF16, FP8):
        cache = make_kv_layer(64, 16, kv_heads, width, dtype, META)
        for rows, longest in ((1, 1), (256, 1), (4, 512)):
            plan = AttentionPlan(
                ints(rows, 64), ints(rows), ints(rows + 1), rows * longest, 1, longest, 1024, split_tokens
            )
            run("paged_attention", tensor(rows * longest, heads, width), cache, plan, rule)
            if dtype == BF16 and longest == 1 and not split_tokens:
                qkv, turn = tensor(rows, (heads + 2 * kv_heads) * width), tensor(2, rows, 1, width)
                norms = HeadNorms(tensor(width), tensor(width), 1e-6)
                slots = ints(rows, dtype=torch.int64)
                run("attend_projection", qkv, *turn.float(), cache, slots, norms, plan, rule)


def prompts(heads: int, kv_heads: int, width: int, rule: AttentionRule) -> None:
    """By the kernel for Hopper, from both caches, with and without gathered contexts."""
    from atom_ops.triton_impl.attention import hopper_attention
    from atom_ops.triton_impl.attention.gathered_contexts import gather_contexts
    from atom_ops.triton_impl.attention.query_tiles import ListTiles

    plan = AttentionPlan(ints(2, 4096), ints(2), ints(3), 2048, 1024, 1024, 65536)
    listed = plan.derived(ListTiles(hopper_attention.tile_length(heads, kv_heads), 2))
    q_THE = tensor(2048, heads, width)
    cache, float8 = (make_kv_layer(64, 16, kv_heads, width, dtype, META) for dtype in (BF16, FP8))
    for each in (cache, float8):
        for contexts in (None, gather_contexts(each, plan, BF16, rule.window)):
            hopper_attention.attend(torch.empty_like(q_THE), q_THE, each, contexts, plan, listed, rule, 132)


def latent_attention(heads: int, split_tokens: int) -> None:
    """DeepSeek-V3's, with `heads` heads on a rank."""
    query, latent, rope, nope, value = 1536, 512, 64, 128, 128
    norms = LatentNorms(tensor(query), tensor(latent), 1e-6)
    expansion = tensor(heads, nope + value, latent)
    for dtype in (BF16, FP8):
        cache = make_latent_layer(64, 16, latent, rope, dtype, META)
        for rows, longest in ((1, 1), (256, 1), (4, 512)):
            tokens = rows * longest
            plan = AttentionPlan(
                ints(rows, 64), ints(rows), ints(rows + 1), tokens, 1, longest, 1024, split_tokens
            )
            turn = tensor(2, tokens, 1, rope, dtype=torch.float32)
            slots, latents = ints(tokens, dtype=torch.int64), tensor(tokens, query + latent + rope)
            run("norm_and_write_latents", latents, norms, *turn, cache, slots, True)
            run("write_latent", latents[:, query:], norms.kv_weight_C, 1e-6, *turn, cache, slots, True)
            q_THE = tensor(tokens, heads, nope + rope)
            for provider in ("triton", BATCH_INVARIANT):
                absorb, expand = (
                    REGISTRY[op].providers[provider] for op in ("absorb_queries", "expand_values")
                )
                q_THK = absorb.function(q_THE, expansion[:, :nope], *turn, True)
                expand.function(q_THK[..., :latent], expansion[:, nope:])
            run("kv_indices", plan, 16)
            run("latent_attention", q_THK, cache, plan, 0.1)
            part = replace(cache, shard=TokenShard(3, 8))
            run("norm_and_write_latents", latents, norms, *turn, part, slots, True)
            run("partial_latent_attention", q_THK, part, plan, 0.1)
            run(
                "merge_partials",
                tensor(8, tokens, heads // 8, latent),
                tensor(8, tokens, heads // 8, dtype=torch.float32),
            )
            run("prompt_attention", q_THE, q_THE, tensor(tokens, heads, value), plan, 0.1)


def sparse_attention(index_heads: int, heads: int) -> None:
    """The top 2048 tokens of DeepSeek-V3.2 or GLM-5, with `heads` attention heads on a rank."""
    latent, rope, width, count = 512, 64, 128, 2048
    norm = IndexNorm(tensor(width), tensor(width), 1e-6)
    for dtype in (BF16, FP8):
        cache = make_latent_layer(64, 16, latent, rope, dtype, META)
        keys = make_index_keys(64, 16, width, dtype, META)
        for rows, longest in ((1, 1), (256, 1), (4, 512)):
            tokens = rows * longest
            plan = AttentionPlan(ints(rows, 512), ints(rows), ints(rows + 1), tokens, 1, longest, 8192)
            turn = tensor(2, tokens, 1, rope, dtype=torch.float32)
            slots = ints(tokens, dtype=torch.int64)
            run("write_index_keys", tensor(tokens, width), norm, *turn, keys, slots, False)
            weights = tensor(tokens, index_heads, dtype=torch.float32)
            run("index_topk", tensor(tokens, index_heads, width), weights, keys, plan, count)
            chosen = TopKIndices(ints(tokens, count), ints(tokens))
            run("sparse_latent_attention", tensor(tokens, heads, latent + rope), cache, chosen, 0.1)


@chips
@pytest.mark.parametrize(("index_heads", "heads"), [(64, 16), (64, 128), (32, 8)])
def test_sparse_attention(index_heads: int, heads: int, chip: str) -> None:
    triton_impl.load()
    with compiling_for(CHIPS[chip]) as compiled:
        sparse_attention(index_heads, heads)
    check(compiled, chip)


def compressed_attention(heads: int) -> None:
    """DeepSeek-V4's, with `heads` heads on a rank."""
    for rows, longest in ((1, 1), (64, 1), (4, 512)):
        tokens = rows * longest
        plan = AttentionPlan(ints(rows, 512), ints(rows), ints(rows + 1), tokens, 1, longest, 8192)
        turn = tensor(2, tokens, 1, 64, dtype=torch.float32)
        recent = CachedRows(tensor(64, 16, 512), plan, 16, window=128)
        run("write_normed_rows", tensor(tokens, 512), tensor(512), 1e-6, *turn, recent.rows, ints(tokens))
        q_THE, sinks = tensor(tokens, heads, 512), tensor(heads, dtype=torch.float32)
        run("normed_queries", q_THE, 1e-6, *turn)
        for rate, windows in ((4, 2), (128, 1)):
            entries = CachedRows(tensor(64, rows_of_block(16, rate), 512), plan, 16, rate)
            states = CachedRows(tensor(64, 16, 2 * windows * 512), plan, 16, window=windows * rate)
            run("write_rows", tensor(tokens, states.rows.shape[2]), states.rows, ints(tokens))
            bias = tensor(rate, windows * 512, dtype=torch.float32)
            run("compress_rows", states, bias, tensor(512), 1e-6, turn[0, :, 0], entries)
            chosen = TopKIndices(ints(tokens, 512), ints(tokens)) if windows == 2 else None
            run("compressed_attention", q_THE, recent, entries, chosen, sinks, *turn)


@chips
@pytest.mark.parametrize("heads", [16, 64])
def test_compressed_attention(heads: int, chip: str) -> None:
    triton_impl.load()
    with compiling_for(CHIPS[chip]) as compiled:
        compressed_attention(heads)
    check(compiled, chip)


@chips
@pytest.mark.parametrize("heads", [16, 128])
def test_latent_attention(heads: int, chip: str) -> None:
    triton_impl.load()
    with compiling_for(CHIPS[chip]) as compiled:
        for split_tokens in (0, BATCH_INVARIANT_SPLIT):
            latent_attention(heads, split_tokens)
    check(compiled, chip)


@chips
@pytest.mark.parametrize("model", list(MODELS))
def test_a_step_of_a_model(model: str, chip: str) -> None:
    triton_impl.load()
    with compiling_for(CHIPS[chip]) as compiled:
        for tokens in (1, 16384):
            small_kernels(model, tokens)
        for split_tokens in (0, BATCH_INVARIANT_SPLIT):
            attention(*MODELS[model][:3], AttentionRule(0.1), split_tokens)
    check(compiled, chip)


@chips
def test_windows_sinks_caps_and_chunks(chip: str) -> None:
    """With the heads of GPT-OSS."""
    triton_impl.load()
    with compiling_for(CHIPS[chip]) as compiled:
        for split_tokens, cap in ((0, 0.0), (BATCH_INVARIANT_SPLIT, 0.0), (0, 50.0)):
            attention(64, 8, 64, AttentionRule(0.1, 128, tensor(64), cap, cap > 0), split_tokens)
    check(compiled, chip)


@chips
def test_every_plan_and_tile_of_linear(chip: str) -> None:
    triton_impl.load()
    from atom_ops.triton_impl.linear import batch_invariant, linear
    from atom_ops.triton_impl.plans.shipped import shipped_plans

    x = tensor(256, 4096)
    with compiling_for(CHIPS[chip]) as compiled:
        if chip == "H200":
            for (outputs, inputs), plans in shipped_plans("NVIDIA H200").linear.items():
                for plan in plans:
                    x_TI = tensor(plan.tokens, inputs)
                    for out_dtype in (None, torch.float32):
                        linear.multiply(plan, x_TI, tensor(outputs, inputs), None, out_dtype)
            for tile in batch_invariant._HOPPER:
                for tokens in (1, 256, 16384):
                    x_TI, weight = tensor(tokens, 4096), tensor(24576, 4096)
                    for out_dtype in (None, torch.float32):
                        batch_invariant.multiply(tile, x_TI, weight, None, True, out_dtype)
        batch_invariant.multiply(batch_invariant._ANYWHERE, x, tensor(4096, 4096), tensor(4096), False)
        batch_invariant.multiply(batch_invariant._FLOAT32, x.float(), tensor(4096, 4096).float(), None, False)
    check(compiled, chip)


@pytest.mark.parametrize(
    "format", ["fp8-block", "fp8-channel", "int8-channel", "int4-128", "int4-32", "mxfp4"]
)
def test_linear_with_quantized_weights(format: str) -> None:
    """On NVIDIA alone, where it is used."""
    triton_impl.load()
    from atom_ops.triton_impl.linear import hopper_gemv, hopper_linear
    from atom_ops.triton_impl.plans.linear_plans import StreamKPlan
    from atom_ops.triton_impl.plans.shipped import shipped_plans
    from atom_ops.triton_impl.quantized import (
        eight_bit_linear,
        four_bit_gemv,
        four_bit_linear,
        four_bit_mma,
        four_bit_ring,
        four_bit_split_k,
        four_bit_wgmma,
        quantized_gemv,
    )
    from atom_ops.triton_impl.quantized.quantized_candidates import candidates
    from atom_ops.triton_impl.quantized.quantized_plans import (
        GemmPlan,
        GemvPlan,
        MmaPlan,
        PersistentGemvPlan,
        RingPlan,
        WgmmaPlan,
        general_plans,
    )
    from atom_ops.triton_impl.quantized.rounded_rows import round_rows

    shipped = shipped_plans("NVIDIA H200").quantized
    measured = [key for key in shipped if key[0] == format]
    four_bit = format.startswith(("int4", "mxfp4"))
    form: Any = "int8" if format == "int8-channel" else "e4m3"
    with compiling_for(CHIPS["H200"]) as compiled:
        for key in dict.fromkeys([*measured, (format, 4096, 4096), (format, 1000, 96 * 32)]):
            weight, bias = packed(*key), tensor(key[1])
            for plan in dict.fromkeys([*shipped.get(key, ()), *general_plans(key)]):
                x = tensor(1 if isinstance(plan, GemvPlan) else 64, key[2])
                if isinstance(plan, GemvPlan):
                    norm = (x, tensor(key[2]), 1e-6, x) if plan.columns == 0 else ()
                    gemv = four_bit_gemv if four_bit else quantized_gemv
                    gemv.multiply(plan, x, weight, bias, tensor(1, key[1]), *norm)
                elif isinstance(plan, PersistentGemvPlan):
                    hopper_gemv.multiply(plan, tensor(1, key[2]), weight, tensor(1, key[1]))
                elif isinstance(plan, WgmmaPlan):
                    symmetric = replace(weight, zeros=None)
                    if four_bit_wgmma.reads(symmetric):
                        four_bit_split_k.multiply(plan, tensor(plan.tokens, key[2]), symmetric, bias)
                elif isinstance(plan, RingPlan):
                    symmetric, x = replace(weight, zeros=None), tensor(plan.tokens, key[2])
                    four_bit_ring.multiply(plan, x, symmetric, bias, tensor(plan.tokens, key[1]))
                    ring_of_one(key, symmetric)
                elif isinstance(plan, StreamKPlan):
                    rows, _ = round_rows(x, form, plan.tile)
                    hopper_linear.multiply_e4m3(plan, rows, 64, weight, None, BF16)
                elif isinstance(plan, GemmPlan) and four_bit:
                    four_bit_linear.multiply(plan, tensor(plan.tile, key[2]), weight, bias, BF16)
                elif isinstance(plan, GemmPlan):
                    rows, _ = round_rows(x, form, plan.tile, residual_TD=x, norm_weight_D=x[0], eps=1e-6)
                    eight_bit_linear.multiply(plan, rows, 64, weight, bias, BF16)
            if four_bit:
                for plan in candidates(key, 1):
                    if isinstance(plan, MmaPlan):
                        four_bit_mma.multiply(plan, tensor(1, key[2]), weight, bias, tensor(1, key[1]))
                four_bit_linear.dequantized(weight, BF16)
        if format == "fp8-block":
            weight = packed(format, 4096, 12288)
            persistent = [
                plan for plan in candidates((format, 4096, 12288), 1) if isinstance(plan, PersistentGemvPlan)
            ]
            for plan in persistent:
                hopper_gemv.multiply(plan, tensor(1, 2 * 12288), weight, tensor(1, 4096), gated=True)
        round_rows(tensor(64, 2 * 12288), form, 64, gated=True, group=128 if format == "fp8-block" else 0)
    check(compiled, "H200")


def ring_of_one(key: tuple[str, int, int], weight: Any) -> None:
    """One token, after a norm with and without a residual, and after an activation."""
    from atom_ops.triton_impl.quantized import four_bit_ring
    from atom_ops.triton_impl.quantized.quantized_plans import RingPlan

    _, outputs, inputs = key
    x, norm = tensor(1, inputs), tensor(inputs)
    for plan in (RingPlan(1, 4), RingPlan(1, 2, 16)):
        for residual in ({}, {"residual_TI": x, "total_TI": x}):
            options: dict[str, Any] = {"norm_weight_I": norm, **residual}
            four_bit_ring.multiply(plan, x, weight, None, tensor(1, outputs), **options)
        four_bit_ring.multiply(plan, tensor(1, 2 * inputs), weight, None, tensor(1, outputs), gated=True)


def packed(format: str, outputs: int, inputs: int) -> Any:
    if format == "fp8-block":
        scales = tensor(-(-outputs // 128), -(-inputs // 128), dtype=torch.float32)
        return BlockFP8(tensor(outputs, inputs, dtype=torch.float8_e4m3fn), scales, (128, 128))
    if format.endswith("channel"):
        scales = tensor(outputs, dtype=torch.float32)
        if format == "int8-channel":
            return ChannelINT8(ints(outputs, inputs, dtype=torch.int8), scales)
        return ChannelFP8(tensor(outputs, inputs, dtype=torch.float8_e4m3fn), scales)
    chunks = -(-inputs // 128)
    words = ints(outputs, 32 * chunks, dtype=torch.int16)
    if format == "mxfp4":
        return FourBitWords(words, ints(outputs, -(-chunks // 4) * 4), None, inputs)
    groups = inputs // int(format.split("-")[1])
    zeros = ints(outputs, groups, dtype=torch.uint8)
    return FourBitWords(words, tensor(outputs, groups), zeros, inputs)


@chips
def test_every_plan_of_experts(chip: str) -> None:
    """With the layers of Qwen3-30B-A3B, and of GPT-OSS-20B with its biases."""
    triton_impl.load()
    from atom_ops.triton_impl.experts import expert_plans, experts
    from atom_ops.triton_impl.plans.shipped import shipped_plans

    hopper: list[expert_plans.ExpertPlan] = [plan for _, plan in expert_plans._HOPPER]
    anywhere: list[expert_plans.ExpertPlan] = [plan for _, plan in expert_plans._ANYWHERE]
    anywhere += [expert_plans._FEW, expert_plans.BATCH_INVARIANT]
    tuned = list(shipped_plans("NVIDIA H200").experts.items())
    hopper += [plan for layer, plans in tuned if layer[0] == "plain" for plan in plans]
    hopper.append(expert_plans.BATCH_INVARIANT)
    with compiling_for(CHIPS[chip]) as compiled:
        for count, hidden, features, chosen in ((128, 2048, 768, 8), (32, 2880, 2880, 4)):
            biased = count == 32
            weights = ExpertWeights(
                tensor(count, 2 * features, hidden),
                tensor(count, hidden, features),
                tensor(count, 2 * features) if biased else None,
                tensor(count, hidden) if biased else None,
            )
            activation = ClampedSwiglu(7.0, 1.702) if biased else None
            for tokens in (1, 4096):
                ids = ints(tokens, chosen, dtype=torch.int64)
                args = tensor(tokens, hidden), ids, tensor(tokens, chosen, dtype=torch.float32), weights
                for plan in dict.fromkeys(anywhere):
                    experts.multiply(plan, *args, activation, False)
                for plan in dict.fromkeys(hopper) if chip == "H200" else ():
                    experts.multiply(plan, *args, activation, True)
    check(compiled, chip)


def quantized(format: str, experts: int, outputs: int, inputs: int) -> Any:
    """A stack of matrices as the kernels read it."""
    shape, chunks = (experts, outputs, inputs), -(-inputs // 128)
    if format == "block_fp8":
        scales = tensor(experts, -(-outputs // 128), chunks, dtype=torch.float32)
        return BlockFP8(tensor(*shape, dtype=FP8), scales, (128, 128))
    if format == "int8":
        return ChannelINT8(ints(*shape, dtype=torch.int8), tensor(experts, outputs, dtype=torch.float32))
    exponents = ints(experts, outputs, -(-chunks // 4) * 4)
    scales = exponents if format == "mxfp4" else tensor(experts, outputs, inputs // 32)
    return FourBitWords(ints(experts, outputs, 32 * chunks, dtype=torch.int16), scales, None, inputs)


@chips
@pytest.mark.parametrize("format", ["block_fp8", "int8", "mxfp4", "int4"])
def test_every_plan_of_quantized_experts(format: Any, chip: str) -> None:
    """With the layers of Qwen3-30B-A3B, for 4-bit weights of GPT-OSS-20B."""
    if format == "block_fp8" and chip != "H200":
        pytest.skip("experts in FP8 run on torch or AITER there")
    triton_impl.load()
    from atom_ops.triton_impl.experts import expert_plans as plans
    from atom_ops.triton_impl.experts import experts
    from atom_ops.triton_impl.plans.shipped import shipped_plans

    four_bit = format in ("mxfp4", "int4")
    tables = (*plans._HOPPER_4BIT, *plans._HOPPER_4BIT_ANY) if four_bit else plans._HOPPER_8BIT
    hopper = [plan for _, plan in tables]
    shipped = shipped_plans("NVIDIA H200").experts
    tuned = [found for layer, found in shipped.items() if layer[0] == format]
    tried: list[plans.ExpertPlan] = [
        *hopper,
        plans.BATCH_INVARIANT,
        *(plan for found in tuned for plan in found),
    ]
    anywhere: list[plans.ExpertPlan] = [plans.few(format), plans._ANYWHERE[-1][1], plans.BATCH_INVARIANT]
    count, hidden, features, chosen = (32, 2880, 2880, 4) if four_bit else (128, 2048, 768, 8)
    if format == "int4":
        hidden, features = 4096, 2048  # groups of 32 fill chunks
    matrices = quantized(format, count, 2 * features, hidden), quantized(format, count, hidden, features)
    biases = (tensor(count, 2 * features), tensor(count, hidden)) if four_bit else (None, None)
    activation = ClampedSwiglu(7.0, 1.702) if four_bit else None
    with compiling_for(CHIPS[chip]) as compiled:
        args = (
            tensor(64, hidden),
            ints(64, chosen, dtype=torch.int64),
            tensor(64, chosen, dtype=torch.float32),
        )
        for plan, described in [(plan, False) for plan in anywhere] + [(plan, True) for plan in tried]:
            if described and chip != "H200":
                continue
            experts.multiply(plan, *args, ExpertWeights(*matrices, *biases), activation, described)
    check(compiled, chip)


def test_the_all_reduce_over_peer_memory() -> None:
    """On NVIDIA alone, where it is used."""
    triton_impl.load()
    from atom_ops.triton_impl.elementwise.all_reduce import Inboxes, all_reduce_rows
    from atom_ops.triton_impl.experts.received_rows import add_received_rows

    with compiling_for(CHIPS["H200"]) as compiled:
        for ranks, two_shots in ((2, False), (8, False), (8, True)):
            inboxes = Inboxes(1, ints(ranks, dtype=torch.int64), 1 << 20, ints(256))
            for width in (576, 2880, 4096, 7168):
                x, weight = tensor(64, width), tensor(width)
                all_reduce_rows(x, x, weight, 1e-6, inboxes, two_shots)
                all_reduce_rows(x, None, None, 0.0, inboxes, two_shots)
                add_received_rows(x, x, (ints(1), ints(1)), x, weight, 1e-6)
    check(compiled, "H200")


@chips
def test_an_unknown_gpu_has_plans_to_choose_from(chip: str) -> None:
    """For one token, and the class that needs the most shared memory: enough plans fit without spilling."""
    triton_impl.load()
    from atom_ops.triton_impl.linear import linear
    from atom_ops.triton_impl.plans import linear_plans, tuning

    for least, tokens in (tuning.CLASSES[0], tuning.CLASSES[-1]):
        fitting = 0
        for plan in tuning.candidates((4096, 1024), least, tokens):
            if isinstance(plan, linear_plans.StreamKPlan) and chip != "H200":
                continue
            assert isinstance(plan, linear_plans.LinearPlan | linear_plans.StreamKPlan)
            with compiling_for(CHIPS[chip]) as compiled:
                linear.multiply(plan, tensor(tokens, 1024), tensor(4096, 1024), None)
            if all(each.shared <= CHIPS[chip].shared_memory and not each.spilled for each in compiled):
                fitting += 1
                check(compiled, chip)
        assert fitting >= 3


def test_kernels_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, decodes of a float8 cache, and the fused GEMVs, which have plans for an H200 alone."""
    triton_impl.load()
    from atom_ops.triton_impl.attention import hopper_decode
    from atom_ops.triton_impl.linear import fused_linear
    from atom_ops.triton_impl.plans.shipped import shipped_plans

    with compiling_for(CHIPS["H200"]) as compiled:
        # GPT-OSS.
        for window in (0, 128):
            prompts(64, 8, 64, AttentionRule(0.1, window, tensor(64)))
        for heads, kv_heads, width, *_ in MODELS.values():
            prompts(heads, kv_heads, width, AttentionRule(0.1))
            q_THE, arrived = tensor(64, heads, width), ints(64 * kv_heads)
            cache = make_kv_layer(64, 16, kv_heads, width, FP8, META)
            plan = AttentionPlan(ints(64, 64), ints(64), ints(65), 64, 1, 1, 1024)
            out_THE = torch.empty_like(q_THE)
            hopper_decode.attend(out_THE, q_THE, cache, plan, AttentionRule(0.1), arrived, 132)
        for (outputs, inputs), fused in shipped_plans("NVIDIA H200").silu_linear.items():
            monkeypatch.setattr(fused_linear, "_plan", lambda *args, fused=fused: fused)
            run("silu_and_mul_linear", tensor(1, 2 * inputs), tensor(outputs, inputs))
        for (outputs, inputs), fused in shipped_plans("NVIDIA H200").norm_linear.items():
            monkeypatch.setattr(fused_linear, "_plan", lambda *args, fused=fused: fused)
            x_TD = tensor(1, inputs)
            run("add_norm_linear", x_TD, x_TD, tensor(inputs), 1e-6, tensor(outputs, inputs))
    check(compiled, "H200")


def table() -> list[Any]:
    triton_impl.load()
    return [
        pytest.param(provider, case, id=f"{op.name}-{provider.name}-{case.label}")
        for op in REGISTRY.values()
        for provider in op.providers.values()
        for case in op.cases
        if provider.function.__module__.startswith(triton_impl.__name__)
    ]


@chips
def test_every_case_of_every_provider(chip: str) -> None:
    with compiling_for(CHIPS[chip]) as compiled:
        for row in table():
            provider, case = row.values
            args = arguments(case)
            if provider.supports is None or provider.supports(*args):
                provider.function(*args)
    check(compiled, chip)


def arguments(case: Case) -> tuple[Any, ...]:
    given = case.make(BF16, torch.Generator().manual_seed(3))
    return changed(given, lambda tensor: tensor.to(META))


_WITHOUT_NVIDIA = """
import sys, triton
sys.modules["triton.language.extra.cuda"] = None
from atom_ops import triton_impl
from atom_ops.triton_impl.hardware import target
from tests.compile.test_chips import small_kernels
from tests.helpers.kernels.chips import CHIPS, compiling_for

triton_impl.load()
with compiling_for(CHIPS["MI300"]) as compiled:
    small_kernels("Qwen3-0.6B", 1)
assert compiled
"""


def test_a_triton_for_amd_alone() -> None:
    """It may lack what is NVIDIA's, which no kernel needs there."""
    subprocess.run([sys.executable, "-c", _WITHOUT_NVIDIA], check=True, timeout=600)


def test_every_kernel_has_a_case(request: pytest.FixtureRequest) -> None:
    """The last test: the others must have run before."""
    if request.config.getoption("keyword") or request.session.testsfailed:
        pytest.skip("it needs all other tests of this file")
    for kernel in launched():
        chips = [chip for name, chip in CHIPS.items() if name == "H200" or not kernel.startswith(NVIDIA_ONLY)]
        missing = {chip.architecture for chip in chips} - set(COMPILED.get(kernel, ()))
        assert not missing, f"no test compiles {kernel} for {missing}"
    on_amd = {name for name, variants in COMPILED.items() if set(variants) - {"sm_90"}}
    assert not [name for name in on_amd if name.startswith(NVIDIA_ONLY)]


def check(compiled: list[Compiled], chip: str) -> None:
    """Everything fits, and nothing spills on AMD; tiles for NVIDIA were measured, spills included."""
    assert compiled
    record(compiled, chip)
    too_large = {each.kernel: each for each in compiled if each.shared > CHIPS[chip].shared_memory}
    assert not too_large
    spilling = {each.kernel: each for each in compiled if each.spilled and chip != "H200"}
    assert not spilling
