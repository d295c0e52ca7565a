"""Paged attention in Triton: which kernels a step launches, with what grid and tiles.

    decode_attention     rows of few tokens (decodes). Memory-bound, so each context is also split
                         over several programs; the last program of a row to finish merges them.
    prefill_attention    tiles of rows of many tokens. Compute-bound; one program for each tile.

A step launches either or both; each kernel skips the other's rows. Launches depend only on the
numbers in the plan, never on its tensors, so that a captured graph can be replayed with other values. On
Hopper `hopper_attention` takes the prompts instead.

With `split_tokens` both kernels split every context at the same positions, use the same block
sizes and merge in the same order: a token's bits depend on neither its batch nor its phase.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from atom_ops.ops.attention.attention import AttentionRule, paged_attention
from atom_ops.ops.attention.attention_plan import AttentionPlan
from atom_ops.ops.attention.kv_cache import KVLayer
from atom_ops.triton_impl.attention.attention_kernels import LOG2_E, decode_attention, prefill_attention
from atom_ops.triton_impl.attention.gathered_contexts import gather_contexts
from atom_ops.triton_impl.attention.query_tiles import ListTiles
from atom_ops.triton_impl.hardware.device_state import kept
from atom_ops.triton_impl.hardware.pdl import launch_options
from atom_ops.triton_impl.hardware.persistent import num_sms
from atom_ops.triton_impl.hardware.target import INTERPRETED, NEEDS, is_hopper, runs_on
from atom_ops.triton_impl.quantized.fp8 import converts_float8


@dataclass(frozen=True, slots=True)
class _KernelConfig:
    """Tile sizes and compile options of a kernel; the values below were the fastest on an H200."""

    queries: int
    """BLOCK_M: query heads x tokens of a program."""
    tokens: int
    """BLOCK_N: context tokens of one iteration."""
    warps: int
    stages: int
    programs: int = 0
    """Most programs per SM; contexts are split where rows x heads are fewer."""
    least_blocks: int = 1
    """Fewest iterations of a split."""
    filled: int = 0
    """Programs per SM that use all of the memory's bandwidth, for `decode_attention`; 0: not measured."""


MERGED_AT_ONCE = 8
"""Splits of a context whose partial results are loaded together when they are merged."""
_MAX_DECODE_QUERIES = 64
"""Query heads x tokens of a decoding row with drafts: with more, its row is computed like a prompt."""
_MAX_PAIRS = 1 << 18
"""Most rows x key/value heads of a step: each has a counter in `arrival_counters`."""
_CROWDED = 12
"""Rows x key/value heads for each SM from which tiles of 8 queries are faster with 128 features, too."""


def _decode_config(
    group: int,
    width: int,
    dtype: torch.dtype,
    per_sm: float,
    tokens: int = 1,
    float8: bool = False,
    window: bool = False,
) -> _KernelConfig:
    """`per_sm`: rows x key/value heads for each SM; with few, each needs more loads in flight.

    Elsewhere a split has at least 256 tokens, so that merging pays; float8, whose bytes need more
    instructions each, takes larger tiles or fewer warps, which wait less for one another.

    All `tokens` of a decoding row are queries of one program, as far as registers allow.
    """
    few = _is_few(per_sm)
    narrow = width <= 128 and dtype != torch.float32 and torch.version.hip is None
    small_tiles = few or (not float8 and (width <= 64 or per_sm >= _CROWDED))
    queries = max(8 if small_tiles and narrow else 16, triton.next_power_of_2(group))
    if group * tokens <= _MAX_DECODE_QUERIES:
        queries = max(queries, triton.next_power_of_2(group * tokens))
    if dtype == torch.float32:
        return _KernelConfig(queries, 32, 4, 2 if width <= 128 else 1, 2)
    measured = narrow and queries <= 16
    if few:
        if width <= 64 and measured and not float8 and not window:
            return _KernelConfig(queries, 256, 4, 1, 2)
        stages = 3 if float8 and measured else 1
        return _KernelConfig(queries, 128 if width <= 128 else 64, 4, stages, 2)
    if not measured:
        return _KernelConfig(queries, 32, 4, 3, 4)
    if float8:
        if width <= 64:
            return _KernelConfig(queries, 128, 2, 2, 8, 2)
        return _KernelConfig(queries, 32, 1, 3, 16, 4)
    return _KernelConfig(queries, 64, 2, 2, 16, 4, filled=3 if width > 64 else 6)


def _is_few(per_sm: float) -> bool:
    return 2 * per_sm <= 1


def _prefill_config(group: int, width: int, dtype: torch.dtype, float8: bool) -> _KernelConfig:
    least = triton.next_power_of_2(group)
    if dtype == torch.float32:
        return _KernelConfig(max(32, least), 32, 4, 1)
    if width > 128:
        return _KernelConfig(max(64, least), 32, 4, 2)
    if torch.version.hip is not None:
        # The largest tiles whose registers suffice: a lane of 8 waves has 256, of 4 waves 512.
        return _KernelConfig(max(64, least), 32, 4, 1) if float8 else _KernelConfig(max(128, least), 32, 8, 1)
    return _KernelConfig(max(128, least), 64, 8, 3)


def supports(q_THE: Tensor, cache: KVLayer, plan: AttentionPlan, rule: AttentionRule) -> bool:
    kv_heads, width = cache.kv.shape[3:]
    if INTERPRETED and q_THE.dtype == torch.bfloat16:
        return False  # the interpreter's bfloat16 tl.dot is wrong
    return (
        16 <= width <= 256
        and (cache.scale is None or width % 2 == 0)  # float8 codes are read as words of two
        and q_THE.stride(2) == 1
        and q_THE.shape[1] <= 128 * kv_heads
        and len(plan.context_lens_R) * kv_heads <= _MAX_PAIRS
    )


@paged_attention.provider("triton", needs=NEEDS, supported=runs_on, supports=supports)
def _paged_attention(q_THE: Tensor, cache: KVLayer, plan: AttentionPlan, rule: AttentionRule) -> Tensor:
    _, heads, width = q_THE.shape
    kv_heads = cache.kv.shape[3]
    group = heads // kv_heads
    out_THE = torch.empty(q_THE.shape, dtype=q_THE.dtype, device=q_THE.device)
    prefill = _prefill_config(group, width, q_THE.dtype, cache.scale is not None)
    if plan.split_tokens:
        decode = prefill
        decode_tile = 1
    else:
        decode, decode_tile = _config_of(q_THE, cache, plan, rule)
    if plan.ahead_T is not None:
        decode_tile = 1  # the decode kernels are causal
    hopper_tile = _attend_float8_decodes(out_THE, q_THE, cache, plan, rule)
    if hopper_tile:
        decode_tile = hopper_tile
    elif plan.min_query_len <= decode_tile:
        _launch_decode(out_THE, q_THE, cache, plan, rule, decode, decode_tile)
    longer = decode_tile + 1
    if plan.max_query_len >= longer and not _attend_prompts(out_THE, q_THE, cache, plan, rule, longer):
        _launch_prefill(out_THE, q_THE, cache, plan, rule, prefill, longer)
    return out_THE


def _attend_float8_decodes(
    out_THE: Tensor, q_THE: Tensor, cache: KVLayer, plan: AttentionPlan, rule: AttentionRule
) -> int:
    """Compute the decoding rows with the Hopper kernel where it applies; returns their most tokens, or 0."""
    if cache.scale is None or plan.ahead_T is not None or not is_hopper(q_THE.device):
        return 0
    if _is_few(_per_sm(cache, plan, q_THE.device)):
        return 0
    # Gluon for Hopper comes only with Triton for NVIDIA GPUs.
    from atom_ops.triton_impl.attention import hopper_decode

    if not hopper_decode.supports(q_THE, cache, plan, rule):
        return 0
    arrived = arrival_counters(q_THE.device)
    return hopper_decode.attend(out_THE, q_THE, cache, plan, rule, arrived, num_sms(q_THE.device))


def _per_sm(cache: KVLayer, plan: AttentionPlan, device: torch.device) -> float:
    """Rows x key/value heads for each SM."""
    return len(plan.context_lens_R) * cache.kv.shape[3] / num_sms(device)


def _attend_prompts(
    out_THE: Tensor, q_THE: Tensor, cache: KVLayer, plan: AttentionPlan, rule: AttentionRule, min_tokens: int
) -> bool:
    """Compute rows of at least `min_tokens` tokens with the Hopper kernel; returns whether it applies."""
    if plan.split_tokens or not is_hopper(q_THE.device):
        return False
    if plan.ahead_T is not None:
        return False  # the Hopper kernel is causal
    # Gluon for Hopper comes only with Triton for NVIDIA GPUs.
    from atom_ops.triton_impl.attention import hopper_attention

    if not hopper_attention.supports(q_THE, cache, rule):
        return False
    length = hopper_attention.tile_length(q_THE.shape[1], cache.kv.shape[3])
    listed = plan.derived(ListTiles(length, min_tokens))
    gathered = gather_contexts(cache, plan, q_THE.dtype, rule.window)
    hopper_attention.attend(out_THE, q_THE, cache, gathered, plan, listed, rule, num_sms(q_THE.device))
    return True


def _config_of(
    q_THE: Tensor, cache: KVLayer, plan: AttentionPlan, rule: AttentionRule
) -> tuple[_KernelConfig, int]:
    """The decode kernel's config, and the most tokens of a row that it computes."""
    _, heads, width = q_THE.shape
    kv_heads = cache.kv.shape[3]
    group = heads // kv_heads
    float8 = cache.scale is not None
    per_sm = _per_sm(cache, plan, q_THE.device)
    config = _decode_config(
        group, width, q_THE.dtype, per_sm, plan.decode_query_len, float8, bool(rule.window)
    )
    return config, config.queries // group


def _launch_decode(
    out_THE: Tensor,
    q_THE: Tensor,
    cache: KVLayer,
    plan: AttentionPlan,
    rule: AttentionRule,
    config: _KernelConfig,
    tile: int,
) -> None:
    """Attention of the rows of at most `tile` tokens, split over the context where that helps."""
    kv_heads = cache.kv.shape[3]
    rows = len(plan.context_lens_R)
    seen = rule.window + tile - 1 if rule.window else plan.max_context_len
    splits = _splits(plan, seen, rows * kv_heads, config, q_THE.device)
    padded = triton.next_power_of_2(q_THE.shape[2])
    partials = rows * kv_heads * splits * config.queries if splits > 1 else 0
    decode_attention[(kv_heads, rows, splits)](
        *_tensors(q_THE, out_THE, cache, plan, rule),
        torch.empty(partials * padded, dtype=torch.float32, device=q_THE.device),
        torch.empty(partials * 2, dtype=torch.float32, device=q_THE.device),
        arrival_counters(q_THE.device),
        *_strides(q_THE, cache, plan),
        score_scale(rule),
        **_constants(q_THE, cache, plan, rule, config, tile),
        MERGED_AT_ONCE=MERGED_AT_ONCE,
        LEAST_BLOCKS=config.least_blocks,
        FILLED=0 if rule.window or plan.split_tokens else config.filled * num_sms(q_THE.device),
    )


def _launch_prefill(
    out_THE: Tensor, q_THE: Tensor, cache: KVLayer, plan: AttentionPlan, rule: AttentionRule,
    config: _KernelConfig, min_tokens: int,
) -> None:  # fmt: skip
    kv_heads = cache.kv.shape[3]
    rows = len(plan.context_lens_R)
    tile = config.queries * kv_heads // q_THE.shape[1]
    prefill_attention[(plan.num_tokens // tile + rows, kv_heads)](
        *_tensors(q_THE, out_THE, cache, plan, rule),
        plan.ahead_T,
        *_strides(q_THE, cache, plan),
        score_scale(rule),
        rows,
        min_tokens,
        **_constants(q_THE, cache, plan, rule, config, tile),
    )


def _splits(plan: AttentionPlan, seen: int, pairs: int, config: _KernelConfig, device: torch.device) -> int:
    """Splits of each (row, key/value head); no query sees more than `seen` tokens."""
    if plan.split_tokens:
        touched = triton.cdiv(seen - 1, plan.split_tokens) + 1  # a window may begin inside a split
        return min(touched, triton.cdiv(plan.max_context_len, plan.split_tokens))
    wanted = config.programs * num_sms(device) // pairs
    least = config.tokens * config.least_blocks
    return max(1, min(wanted, triton.cdiv(min(seen, plan.max_context_len), least)))


def score_scale(rule: AttentionRule) -> float:
    """The kernels' factor of q kᵀ: scores are in units of log2 e, or of the soft cap."""
    return rule.scale / rule.soft_cap if rule.soft_cap else rule.scale * LOG2_E.value


def _tensors(
    q_THE: Tensor, out_THE: Tensor, cache: KVLayer, plan: AttentionPlan, rule: AttentionRule
) -> tuple[Tensor | None, ...]:
    return (
        q_THE,
        out_THE,
        _kv(cache),
        # Without scales the kernel ignores this argument.
        plan.context_lens_R if cache.scale is None else cache.scale,
        plan.block_table_RW,
        plan.context_lens_R,
        plan.query_starts_R1,
        rule.sinks_H,
    )


def _strides(q_THE: Tensor, cache: KVLayer, plan: AttentionPlan) -> tuple[int, ...]:
    return *q_THE.stride()[:2], plan.block_table_RW.stride(0), *_kv(cache).stride()[:4]


def _kv(cache: KVLayer) -> Tensor:
    """Keys and values; float8 codes as words of two."""
    return cache.kv if cache.scale is None else cache.kv.view(torch.int16)


def _constants(
    q_THE: Tensor, cache: KVLayer, plan: AttentionPlan, rule: AttentionRule, config: _KernelConfig, tile: int
) -> dict[str, int | bool]:
    heads, width = q_THE.shape[1:]
    return {
        "GROUP": heads // cache.kv.shape[3],
        "WIDTH": width,
        "BLOCK_SIZE": cache.kv.shape[1],
        "TILE": tile,
        "SPLIT_TOKENS": plan.split_tokens,
        "BLOCK_M": config.queries,
        "BLOCK_N": config.tokens,
        "BLOCK_E": max(triton.next_power_of_2(width), 16 if cache.scale is None else 32),
        "SCALED": cache.scale is not None,
        "WINDOW": rule.window,
        "CHUNKED": rule.chunked,
        "SOFT_CAP": rule.soft_cap * LOG2_E.value,
        "PTX": converts_float8(q_THE.device),
        "num_warps": config.warps,
        "num_stages": config.stages,
        **launch_options(q_THE.device),
    }


def arrival_counters(device: torch.device) -> Tensor:
    """Finished splits of each (row, head); 0 between launches."""
    return kept("attention", device, _MAX_PAIRS)
