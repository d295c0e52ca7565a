"""Kernels whose tiles depend on widths and dtypes fit in the shared memory of every kind of GPU.

The widths are those of the families that are served, and dtypes those that the engine's flag names.
"""

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from atom_ops import triton_impl
from atom_ops.op import REGISTRY
from atom_ops.ops.attention.attention import AttentionRule
from atom_ops.ops.attention.attention_plan import BATCH_INVARIANT_SPLIT, AttentionPlan
from atom_ops.ops.attention.kv_cache import FP8, make_kv_layer
from atom_ops.ops.elementwise.hyper_connection import HyperWeights
from atom_ops.ops.latent.compressed_rows import CachedRows
from atom_ops.ops.latent.index_keys import make_index_keys
from atom_ops.ops.latent.latent_cache import make_latent_layer
from atom_ops.ops.linear.linear import BATCH_INVARIANT
from atom_ops.ops.recurrent.gated_delta_rule import DecayWeights
from atom_ops.ops.recurrent.recurrent_state import StatePlan
from atom_ops.triton_impl.hardware import target
from tests.helpers.kernels.chips import CHIPS, L40S, Chip, sizing_for

pytestmark = [
    pytest.mark.compile,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset"),
    pytest.mark.skipif(
        target.INTERPRETED or find_spec("triton") is None, reason="needs triton, not interpreted"
    ),
]

META = torch.device("meta")
EXACT, BF16 = torch.float32, torch.bfloat16
LATENT, ROPE = 512, 64
BLOCKS, BLOCK_SIZE, TOKENS = 64, 16, 2048
each_gpu = pytest.mark.parametrize(
    ("chip", "dtype"),
    [(CHIPS["H200"], EXACT), (CHIPS["MI300"], EXACT), (L40S, EXACT), (L40S, BF16)],
    ids=["H200-float32", "MI300-float32", "L40S-float32", "L40S-bfloat16"],
)
"""An MI355 has more than an MI300, and an A100 more than an L40S, with the same kernels."""


def tensor(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def ints(*shape: int) -> torch.Tensor:
    return tensor(*shape, dtype=torch.int32)


def run(op: str, *args: Any, provider: str = "triton") -> Any:
    found = REGISTRY[op].providers[provider]
    assert found.supports is None or found.supports(*args)
    return found.function(*args)


def caches(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Dtypes of a cache; one in float8 takes no more with float32."""
    return (dtype,) if dtype == EXACT else (dtype, FP8)


def plans(split_tokens: int = 0) -> list[AttentionPlan]:
    """A step of decodes, and one of prompts."""
    made = []
    for rows, tokens in ((64, 64), (4, TOKENS)):
        table = ints(rows, 512), ints(rows), ints(rows + 1)
        made.append(AttentionPlan(*table, tokens, 1, tokens // rows, 8192, split_tokens))
    return made


def latent_heads(dtype: torch.dtype) -> None:
    """DeepSeek-V3 and GLM-5, one token and many."""
    for nope, value in ((128, 128), (192, 256)):
        heads = 16
        for tokens in (1, TOKENS):
            q_THE = tensor(tokens, heads, nope + ROPE, dtype=dtype)
            expansion = tensor(heads, nope + value, LATENT, dtype=dtype)
            turn = tensor(2, tokens, 1, ROPE, dtype=EXACT)
            for provider in ("triton", BATCH_INVARIANT):
                q_THK = run("absorb_queries", q_THE, expansion[:, :nope], *turn, True, provider=provider)
                run("expand_values", q_THK[..., :LATENT], expansion[:, nope:], provider=provider)
        run("prompt_attention", q_THE, q_THE, tensor(tokens, heads, value, dtype=dtype), plans()[1], 0.1)


def latent_attention(dtype: torch.dtype) -> None:
    for cache_dtype in caches(dtype):
        cache = make_latent_layer(BLOCKS, BLOCK_SIZE, LATENT, ROPE, cache_dtype, META)
        for heads in (20, 128):
            for plan in (*plans(), plans(BATCH_INVARIANT_SPLIT)[1]):
                q_THK = tensor(plan.num_tokens, heads, LATENT + ROPE, dtype=dtype)
                run("latent_attention", q_THK, cache, plan, 0.1)


def index_scores(dtype: torch.dtype) -> None:
    for heads, cache_dtype in ((64, dtype), (64, FP8), (128, FP8)):
        keys = make_index_keys(BLOCKS, BLOCK_SIZE, 128, cache_dtype, META)
        q_TGI, weights_TG = tensor(64, heads, 128, dtype=dtype), tensor(64, heads, dtype=EXACT)
        run("index_topk", q_TGI, weights_TG, keys, plans()[0], 2048)


def compressed_attention(dtype: torch.dtype) -> None:
    plan = plans()[0]
    recent = CachedRows(tensor(BLOCKS, BLOCK_SIZE, 512, dtype=dtype), plan, BLOCK_SIZE, window=128)
    turn = tensor(2, plan.num_tokens, 1, ROPE, dtype=EXACT)
    q_THE = tensor(plan.num_tokens, 64, 512, dtype=dtype)
    run("compressed_attention", q_THE, recent, None, None, tensor(64, dtype=EXACT), *turn)


def hyper_connection(dtype: torch.dtype) -> None:
    """DeepSeek-V4."""
    streams, width = 4, 4096
    rows = streams * (2 + streams)
    weights = HyperWeights(
        tensor(rows, streams * width, dtype=EXACT), tensor(rows, dtype=EXACT), tensor(3, dtype=EXACT),
        1e-6, 1e-6, 20,
    )  # fmt: skip
    streams_TND = tensor(TOKENS, streams, width, dtype=dtype)
    _, post_TN, mix_TNN = run("hyper_collapse", streams_TND, weights)
    run("hyper_expand", tensor(TOKENS, width, dtype=dtype), streams_TND, post_TN, mix_TNN)


def paged_attention(dtype: torch.dtype) -> None:
    """Qwen3, GPT-OSS and Gemma 3."""
    for heads, kv_heads, width in ((64, 4, 128), (64, 8, 64), (16, 8, 256)):
        for cache_dtype in caches(dtype):
            cache = make_kv_layer(BLOCKS, BLOCK_SIZE, kv_heads, width, cache_dtype, META)
            for plan in plans():
                q_THE = tensor(plan.num_tokens, heads, width, dtype=dtype)
                run("paged_attention", q_THE, cache, plan, AttentionRule(0.1))


def gated_delta_rule(dtype: torch.dtype) -> None:
    """Qwen3-Next."""
    rows, key_heads, heads, width = 4, 16, 32, 128
    qkv_TC = tensor(TOKENS, (2 * key_heads + heads) * width, dtype=dtype)
    gates_T2N = tensor(TOKENS, 2 * heads, dtype=dtype)
    decay = DecayWeights(tensor(heads, dtype=EXACT), tensor(heads, dtype=EXACT))
    states = tensor(8, heads, width, width, dtype=EXACT)
    slots_R, fresh_R = tensor(rows, dtype=torch.int64), tensor(rows, dtype=torch.bool)
    plan = StatePlan(slots_R, fresh_R, ints(rows + 1), TOKENS, TOKENS // rows)
    run("gated_delta_rule", qkv_TC, gates_T2N, decay, states, plan)


@each_gpu
@pytest.mark.parametrize(
    "launches",
    [
        latent_heads,
        latent_attention,
        index_scores,
        compressed_attention,
        hyper_connection,
        paged_attention,
        gated_delta_rule,
    ],
)
def test_tiles_fit(launches: Any, chip: Chip, dtype: torch.dtype) -> None:
    triton_impl.load()
    with sizing_for(chip) as largest:
        launches(dtype)
    assert largest
    assert not {name: size for name, size in largest.items() if size > chip.shared_memory}
