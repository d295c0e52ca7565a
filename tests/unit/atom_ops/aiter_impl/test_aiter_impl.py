"""The providers and the attention backend of AITER, on a model of AITER in torch (tests/aiter_contract)."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from atom_ops import (
    ALL_TOKENS,
    INTERLEAVED_KV,
    AttentionConfig,
    ExpertRole,
    TokenShard,
    aiter_impl,
    attention_backend,
    backend,
    make_latent_layer,
    pack_expert_weight,
    read_latent,
)
from atom_ops.op import REGISTRY, Case, Op, Provider
from atom_ops.ops.attention.kv_cache import FP8
from atom_ops.ops.latent.latent_attention import latent_case
from atom_ops.weights import Shuffled
from tests.aiter_contract.package import SEMANTICS, Swap, install
from tests.helpers.checkpoints.reference import NEW_TOKENS, TOLERANCE, Reference, make_reference
from tests.helpers.checkpoints.tiny_models import Tiny, tiny
from tests.helpers.engine.core_side import generate
from tests.helpers.engine.teacher_forcing import TinyWorker, forced_logits, step_logits
from tests.helpers.kernels.op_cases import CPU, DTYPES, check
from tests.helpers.parallel.signatures import in_development, published
from tests.helpers.parallel.thread_ranks import RankedWorkers

SIGNATURES = {"published": published(), "in development": published() | in_development()}
OPS = ("rms_norm", "add_rms_norm", "silu_and_mul", "rotary", "linear", "experts", "route")
LATENT_WIDTHS = 512, 64
LATENT_OPS = (
    *("latent_attention", "sparse_latent_attention", "prompt_attention"),
    *("write_latent", "norm_and_write_latents"),
)
# Shapes that AITER's kernels take and the ops' own cases lack: drafts, chunks, head counts.
LATENT_CASES = [
    latent_case([2, 2, 2], [2, 40, 300], 16, decode_query_len=2),
    latent_case([4, 4], [90, 65], 5, decode_query_len=4),
    latent_case([1, 1], [1, 200], 40),
    latent_case([20, 33], [20, 100], 16),
    latent_case([9], [31], 3),
    latent_case([7], [7], 128),
    latent_case([1, 20, 1, 5], [33, 300, 2, 5], 16),
    latent_case([30, 3, 4, 3], [90, 300, 40, 3], 5, decode_query_len=3),
    latent_case([9, 1, 1], [9, 64, 30], 3, fp8=True, shared_scale=True),
    latent_case([1, 1, 1], [1, 40, 300], 40, fp8=True, shared_scale=True),
    latent_case([3, 3], [80, 65], 5, fp8=True, decode_query_len=3, shared_scale=True),
    latent_case([20], [50], 16, fp8=True, shared_scale=True),
]
# Sizes that all of AITER's kernels take.
_SIZES = {"hidden_size": 64, "intermediate_size": 96}
_LATENT_SIZES = {
    **_SIZES, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "moe_intermediate_size": 32,
}  # fmt: skip
_MOE_SIZES = {"moe_intermediate_size": 32, "mlp_only_layers": [0]}
MODELS = {
    "llama": Tiny("llama", "llama", 6, _SIZES | {"head_dim": 24}),
    "qwen3-moe": replace(tiny("qwen3-moe"), seed=2, config=tiny("qwen3-moe").config | _SIZES | _MOE_SIZES),
    "qwen3": Tiny("qwen3", "qwen3", 2, _SIZES),
    "mistral with a window": Tiny("mistral", "mistral", 1, _SIZES | {"sliding_window": 20}),
    "gpt-oss": tiny("gpt-oss"),
    "deepseek-v3": replace(tiny("deepseek-v3"), seed=1, config=tiny("deepseek-v3").config | _LATENT_SIZES),
    "glm-5": replace(
        tiny("glm-5"), seed=1, config=tiny("glm-5").config | _LATENT_SIZES | {"index_head_dim": 72}
    ),
}
_KEEP = "aiter.concat_and_cache_mla"
_UNFUSED = {"aiter.reshape_and_cache_flash", "aiter.rope_cached_fwd"}
"""Calls of a model whose heads the fused cache write does not take."""
COMPLETE = {
    "llama": _UNFUSED,
    "qwen3-moe": {name for name in SEMANTICS if "mla" not in name} - _UNFUSED,
    "deepseek-v3": {name for name in SEMANTICS if "mla" in name} - {_KEEP},
}
"""The functions that steps of a model call."""

Install = Callable[..., Counter[str]]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """`install` with the test's monkeypatch; afterwards ops are as before."""

    def install_and_resolve(name: str = "published", swap: Swap | None = None) -> Counter[str]:
        calls = install(monkeypatch, SIGNATURES[name], swap)
        backend.resolve(CPU)
        return calls

    yield install_and_resolve
    monkeypatch.undo()
    backend.resolve(CPU)


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    return cache(lambda name: make_reference(MODELS[name], tmp_path_factory.mktemp("model")))


def table() -> Iterator[Any]:
    aiter_impl.load()
    for name in (*OPS, *LATENT_OPS):
        op = REGISTRY[name]
        for dtype in DTYPES:
            for case in (*op.cases, *(LATENT_CASES if name == "latent_attention" else ())):
                yield pytest.param(op, dtype, case, id=f"{name}-{str(dtype)[6:]}-{case.label}")


@pytest.mark.parametrize(("op", "dtype", "case"), list(table()))
def test_agrees_with_reference(op: Op[..., Any], dtype: torch.dtype, case: Case, installed: Install) -> None:
    installed()
    provider: Provider = op.providers["aiter"]
    check(op, provider, dtype, case, CPU)


def test_without_an_amd_gpu_nothing_is_used() -> None:
    backend.resolve(CPU)
    assert not any("aiter" in REGISTRY[name].order for name in OPS)
    with pytest.raises(ValueError, match=r"'aiter'.* cannot run on cpu: it needs an MI300 or MI350"):
        backend.resolve(CPU, ["aiter"])


@pytest.mark.parametrize(
    ("name", "signatures"),
    [
        *((name, "published") for name in MODELS),
        *((name, "in development") for name in ("qwen3-moe", "deepseek-v3")),
    ],
)
def test_tiny_models_generate_the_ids_of_transformers(
    name: str, signatures: str, reference_of: Callable[[str], Reference], installed: Install
) -> None:
    reference = reference_of(name)
    calls = installed(signatures)
    worker = TinyWorker(reference.directory)
    found = generate(worker.core(), worker.execute, reference.prompts, NEW_TOKENS, 16, 3)
    assert found == reference.ids
    check_whole_texts(worker, reference)
    check_chunks(worker, reference)
    if name in COMPLETE:
        assert COMPLETE[name] <= set(calls), "functions that no step calls"
    if name == "qwen3-moe":
        assert not set(OPS) & set(backend.ran_in_torch())


@pytest.mark.parametrize(
    ("name", "tp", "dcp"),
    [("qwen3-moe", 2, 1), ("deepseek-v3", 2, 1), ("glm-5", 2, 1), ("deepseek-v3", 2, 2)],
)
def test_ranks_generate_the_ids_of_transformers(
    name: str, tp: int, dcp: int, reference_of: Callable[[str], Reference], installed: Install
) -> None:
    reference = reference_of(name)
    calls = installed()
    ranks = RankedWorkers(reference.directory, tp, dcp)
    found = generate(ranks.core(), ranks.execute, reference.prompts, NEW_TOKENS, 16, 3)
    ranks.close()
    assert found == reference.ids
    reads_latents = calls[_DECODE] > 0
    assert reads_latents == (name != "qwen3-moe" and dcp == 1), "AITER reads no cache that ranks split"


def test_every_function_is_called_by_a_model() -> None:
    assert set(SEMANTICS) == set.union(*COMPLETE.values(), {_KEEP})


def check_chunks(worker: TinyWorker, reference: Reference) -> None:
    """A text's log probabilities, its first tokens in one step and all others in the next."""
    core, continuation = worker.core(), reference.continuations[-1]
    core.add(0, continuation.text)
    counts = 40, len(continuation.text) - 40
    found_TV = forced_logits(worker.worker, core, 0, counts).log_softmax(-1)
    torch.testing.assert_close(found_TV, continuation.logprobs_TV, atol=TOLERANCE, rtol=0)


def check_whole_texts(worker: TinyWorker, reference: Reference) -> None:
    """The texts' log probabilities, all in one step."""
    core = worker.core()
    for row, continuation in enumerate(reference.continuations):
        core.add(row, continuation.text)
    lengths = {row: len(each.text) for row, each in enumerate(reference.continuations)}
    found_TV = step_logits(worker.worker, core.plan(lengths)).log_softmax(-1)
    wanted_TV = torch.cat([each.logprobs_TV for each in reference.continuations])
    torch.testing.assert_close(found_TV, wanted_TV, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["deepseek-v3", "glm-5"])
def test_a_float8_cache_of_latents(
    name: str, reference_of: Callable[[str], Reference], installed: Install
) -> None:
    """torch computes the same from what AITER wrote; one scale costs little more than one of each token."""
    reference = reference_of(name)
    text = reference.continuations[1]

    def logprobs(worker: TinyWorker) -> torch.Tensor:
        core = worker.core()
        core.add(0, text.text)
        counts = [40, *[1] * (len(text.text) - 40)]
        return forced_logits(worker.worker, core, 0, counts).log_softmax(-1)

    def error(found_TV: torch.Tensor) -> torch.Tensor:
        return (found_TV - text.logprobs_TV).abs().mean()

    scale_of_each_token_TV = logprobs(TinyWorker(reference.directory, kv_cache_dtype="fp8"))
    calls = installed()
    worker = TinyWorker(reference.directory, kv_cache_dtype="fp8")
    found_TV = logprobs(worker)
    assert calls[_KEEP] > 0 and calls[_DECODE] > 0
    for op in LATENT_OPS[:3]:
        REGISTRY[op].use([])
    # Rounding may move a number to the next float8, which the tokens after it see.
    difference_TV = (found_TV - logprobs(worker)).abs()
    assert difference_TV.max() < 0.1 and difference_TV.mean() < 0.002
    assert error(found_TV) < 1.5 * error(scale_of_each_token_TV)


def test_float8_latents_are_written_as_the_reference_writes_them(installed: Install) -> None:
    check_float8_writes(installed)


def check_float8_writes(install: Install) -> None:
    install()
    op = REGISTRY["write_latent"]
    latents, *arguments, _, slots, interleaved = op.cases[1].make(
        torch.float32, torch.Generator().manual_seed(1)
    )
    latents[0] *= 300  # saturates
    slots[-1] = -1
    rows = []
    for write in (op.providers["aiter"].function, op.reference):
        cache = op.pack(make_latent_layer(7, 4, *LATENT_WIDTHS, FP8, CPU))
        assert cache.shared_scale
        write(latents, *arguments, cache, slots, interleaved)
        rows.append(read_latent(cache, torch.arange(28), torch.float32))
    assert rows[0].any() and not torch.isnan(rows[0]).any()
    torch.testing.assert_close(*rows, atol=2**-8, rtol=1 / 14)


def test_only_float8_caches_on_one_rank_have_a_shared_scale(installed: Install) -> None:
    installed()
    pack = REGISTRY["write_latent"].pack
    for dtype, widths, shard in (
        (torch.bfloat16, LATENT_WIDTHS, ALL_TOKENS),
        (FP8, (40, 8), ALL_TOKENS),
        (FP8, LATENT_WIDTHS, TokenShard(1, 2)),
    ):
        assert not pack(make_latent_layer(2, 4, *widths, dtype, CPU, shard)).shared_scale
    backend.resolve(CPU, batch_invariant=False, order=["sdpa_cpu"])
    assert not pack(make_latent_layer(2, 4, *LATENT_WIDTHS, FP8, CPU)).shared_scale


_FLASH, _PAGED = "aiter.flash_attn_varlen_func", "aiter.ops.triton.unified_attention.unified_attention"
_WRITE, _MOE = "aiter.reshape_and_cache_flash", "aiter.fused_moe.fused_moe"
_FUSED = "aiter.ops.triton.fused_kv_cache.fused_qk_rope_reshape_and_cache"
# Left out are swaps that change nothing: the addends of a sum, the lengths of whole prompts, equal scales.
SWAPS = [
    ("aiter.rms_norm", "input", "weight"),
    ("aiter.rmsnorm2d_fwd_with_add", "out", "residual_out"),
    ("aiter.rmsnorm2d_fwd_with_add", "residual_in", "residual_out"),
    ("aiter.rmsnorm2d_fwd_with_add", "input", "weight"),
    ("aiter.silu_and_mul", "out", "input"),
    ("aiter.rope_cached_fwd", "cos", "sin"),
    ("aiter.rope_cached_fwd", "reuse_freqs_front_part", "nope_first"),
    ("aiter.tuned_gemm.tgemm.mm", "inp", "weights"),
    (_FUSED, "q", "k"),
    (_FUSED, "k", "v"),
    (_FUSED, "key_cache", "value_cache"),
    (_FUSED, "slot_mapping", "pos"),
    (_FUSED, "cos", "sin"),
    (_FUSED, "cos", "k_scale"),
    (_FUSED, "flash_layout", "apply_scale"),
    (_FUSED, "is_neox", "output_zeros"),
    (_WRITE, "key", "value"),
    (_WRITE, "key_cache", "value_cache"),
    (_WRITE, "key", "key_cache"),
    (_FLASH, "q", "k"),
    (_FLASH, "k", "v"),
    (_FLASH, "softmax_scale", "causal"),
    (_PAGED, "k", "v"),
    (_PAGED, "q", "out"),
    (_PAGED, "cu_seqlens_q", "seqused_k"),
    (_PAGED, "max_seqlen_q", "max_seqlen_k"),
    (_PAGED, "window_size", "sinks"),
    (_PAGED, "block_table", "seqused_k"),
    ("aiter.ops.shuffle.shuffle_weight", "x", "layout"),
    (_MOE, "w1", "w2"),
    (_MOE, "topk_weight", "topk_ids"),
    (_MOE, "hidden_states", "w1"),
    (_MOE, "activation", "quant_type"),
    (_MOE, "expert_mask", "topk_ids"),
]


@pytest.mark.parametrize("swap", SWAPS, ids="-".join)
def test_a_swap_of_two_arguments_is_found(
    swap: Swap, reference_of: Callable[[str], Reference], installed: Install
) -> None:
    """The checks above would find a call that confuses them."""
    reference = reference_of("llama" if swap[0] in COMPLETE["llama"] else "qwen3-moe")
    calls = installed(swap=swap)
    try:
        worker = TinyWorker(reference.directory)
        found = generate(worker.core(), worker.execute, reference.prompts, 4, 16, 3)
        assert found == [ids[:4] for ids in reference.ids]
        check_whole_texts(worker, reference)
    except (AssertionError, AttributeError, IndexError, TypeError, RuntimeError):
        assert calls[swap[0]] > 0
        return
    pytest.fail("the swap changes nothing")


_INFO, _METADATA = "aiter.get_mla_metadata_info_v1", "aiter.get_mla_metadata_v1"
_DECODE, _CHUNKS = "aiter.mla.mla_decode_fwd", "aiter.mla.mla_prefill_fwd"
# Left out are swaps of equal values: the two dtypes, two lengths of a query.
LATENT_SWAPS = [
    (_INFO, "batch_size", "num_head_qo"),
    (_INFO, "max_seqlen_qo", "num_head_qo"),
    (_INFO, "is_sparse", "fast_mode"),
    (_METADATA, "seqlens_qo_indptr", "seqlens_kv_indptr"),
    (_METADATA, "num_heads_per_head_k", "num_heads_k"),
    (_METADATA, "work_indptr", "work_info"),
    (_METADATA, "work_metadata_ptrs", "work_indptr"),
    (_METADATA, "reduce_indptr", "reduce_partial_map"),
    (_METADATA, "reduce_final_map", "reduce_partial_map"),
    (_METADATA, "kv_granularity", "max_seqlen_qo"),
    (_METADATA, "uni_seqlen_qo", "kv_granularity"),
    (_DECODE, "kv_scale", "sm_scale"),
    (_DECODE, "q", "o"),
    (_DECODE, "q", "kv_buffer"),
    (_DECODE, "qo_indptr", "kv_indptr"),
    (_DECODE, "kv_indptr", "kv_indices"),
    (_DECODE, "kv_indices", "kv_last_page_lens"),
    (_DECODE, "max_seqlen_q", "num_kv_splits"),
    (_DECODE, "sm_scale", "max_seqlen_q"),
    (_DECODE, "work_meta_data", "work_indptr"),
    (_DECODE, "work_indptr", "work_info_set"),
    (_DECODE, "reduce_indptr", "reduce_partial_map"),
    (_DECODE, "reduce_final_map", "reduce_partial_map"),
    (_CHUNKS, "q", "o"),
    (_CHUNKS, "q", "kv_buffer"),
    (_CHUNKS, "qo_indptr", "kv_indptr"),
    (_CHUNKS, "kv_indptr", "kv_indices"),
    (_CHUNKS, "kv_indices", "kv_last_page_lens"),
    (_CHUNKS, "max_seqlen_q", "sm_scale"),
]


KEEP_SWAPS = [
    (_KEEP, "kv_c", "k_pe"),
    (_KEEP, "kv_c", "kv_cache"),
    (_KEEP, "slot_mapping", "scale"),
    (_KEEP, "kv_cache_dtype", "scale"),
]


@pytest.mark.parametrize("swap", KEEP_SWAPS, ids="-".join)
def test_a_swap_of_two_arguments_of_a_latent_write_is_found(swap: Swap, installed: Install) -> None:
    with pytest.raises((AssertionError, TypeError, RuntimeError)):
        check_float8_writes(lambda: installed(swap=swap))


@pytest.mark.parametrize("swap", LATENT_SWAPS, ids="-".join)
def test_a_swap_of_two_arguments_of_latent_attention_is_found(swap: Swap, installed: Install) -> None:
    calls = installed(swap=swap)
    op = REGISTRY["latent_attention"]
    try:
        for case in LATENT_CASES:
            check(op, op.providers["aiter"], torch.float32, case, CPU)
    except (AssertionError, AttributeError, IndexError, TypeError, RuntimeError, ValueError):
        assert calls[swap[0]] > 0
        return
    pytest.fail("the swap changes nothing")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shuffled_experts_are_readable_one_by_one(dtype: torch.dtype, installed: Install) -> None:
    """For the reference, and for layers that AITER does not take."""
    installed()
    plain_XOI = torch.randn(3, 128, 64).to(dtype)
    role = ExpertRole(down=True)
    packed = pack_expert_weight(plain_XOI, role)
    assert isinstance(packed, Shuffled) and packed.shape == plain_XOI.shape
    assert not torch.equal(packed.tensor, plain_XOI)
    for number, matrix in enumerate(plain_XOI):
        assert torch.equal(packed.expert(number), matrix)
    assert pack_expert_weight(plain_XOI, replace(role, with_biases=True)) is plain_XOI
    assert isinstance(pack_expert_weight(plain_XOI[:, :80], role), torch.Tensor)


def test_layers_that_the_backend_does_not_take(installed: Install) -> None:
    installed()
    config = AttentionConfig(
        device=CPU, dtype=torch.bfloat16, kv_dtype=torch.bfloat16, block_size=16,
        heads=8, kv_heads=2, head_dim=128, window=0, sinks=False,
    )  # fmt: skip
    assert attention_backend(config).name == "aiter"
    unlike = ({"kv_dtype": torch.float8_e4m3fn}, {"block_size": 24}, {"head_dim": 320})
    for change in (*unlike, {"soft_cap": True}, {"chunked": True}, {"sees_ahead": True}):
        assert attention_backend(replace(config, **change)) is INTERLEAVED_KV


def test_the_comparison_for_a_gpu(
    installed: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What tests/gpu/test_aiter.py does on an MI300, with the model of AITER."""
    from tests.gpu.test_aiter import divergences

    calls = installed()
    with_aiter, without = divergences("llama", CPU, tmp_path, monkeypatch)
    assert calls["aiter.rms_norm"] and 0 < with_aiter < 4 * without + 1e-5
