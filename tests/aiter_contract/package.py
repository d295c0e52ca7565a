"""AITER as a package of torch functions: its published signatures, its documented semantics.

    install(monkeypatch, published())     `import aiter` finds it, and a CPU counts as an MI300

A call must fit the signature. Its arguments then reach the function of the same name in `semantics`, which
checks shapes, dtypes and layouts, and takes no argument that it does not know.
"""

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from atom_ops import aiter_impl, backend
from tests.aiter_contract import (
    attention,
    fused,
    gemm,
    latent,
    machine,
    moe,
    mxfp4,
    reduce,
    rounding,
    routing,
    rows,
    tiles,
)
from tests.helpers.parallel.signatures import parsed

SEMANTICS: dict[str, Callable[..., Any]] = {
    "aiter.rms_norm": rows.rms_norm,
    "aiter.rmsnorm2d_fwd_with_add": rows.rmsnorm2d_fwd_with_add,
    "aiter.silu_and_mul": rows.silu_and_mul,
    "aiter.rope_cached_fwd": rows.rope_cached_fwd,
    "aiter.tuned_gemm.tgemm.mm": gemm.mm,
    "aiter.ops.shuffle.shuffle_weight": tiles.shuffle_weight,
    "aiter.fused_moe.fused_moe": moe.fused_moe,
    "aiter.topk_softmax": routing.topk_softmax,
    "aiter.reshape_and_cache_flash": attention.reshape_and_cache_flash,
    "aiter.ops.triton.fused_kv_cache.fused_qk_rope_reshape_and_cache": (
        attention.fused_qk_rope_reshape_and_cache
    ),
    "aiter.flash_attn_varlen_func": attention.flash_attn_varlen_func,
    "aiter.ops.triton.unified_attention.unified_attention": attention.unified_attention,
    "aiter.get_mla_metadata_info_v1": latent.get_mla_metadata_info_v1,
    "aiter.get_mla_metadata_v1": latent.get_mla_metadata_v1,
    "aiter.concat_and_cache_mla": latent.concat_and_cache_mla,
    "aiter.mla.mla_decode_fwd": latent.mla_decode_fwd,
    "aiter.mla.mla_prefill_fwd": latent.mla_prefill_fwd,
}
QUANTIZED: dict[str, Callable[..., Any]] = {
    "aiter.grouped_topk": routing.grouped_topk,
    "aiter.biased_grouped_topk": routing.biased_grouped_topk,
    "aiter.gemm_a8w8": gemm.gemm_a8w8,
    "aiter.gemm_a8w8_bpreshuffle": gemm.gemm_a8w8_bpreshuffle,
    "aiter.gemm_a8w8_blockscale": gemm.gemm_a8w8_blockscale,
    "aiter.gemm_a8w8_blockscale_bpreshuffle": gemm.gemm_a8w8_blockscale_bpreshuffle,
    "aiter.rmsnorm2d_fwd_with_dynamicquant": fused.rmsnorm2d_fwd_with_dynamicquant,
    "aiter.rmsnorm2d_fwd_with_add_dynamicquant": fused.rmsnorm2d_fwd_with_add_dynamicquant,
    "aiter.ops.triton.fused_fp8_quant.fused_rms_fp8_group_quant": fused.fused_rms_fp8_group_quant,
    "aiter.ops.triton.fused_mxfp4_quant.fused_rms_mxfp4_quant": fused.fused_rms_mxfp4_quant,
    "aiter.scaled_silu_and_mul": fused.scaled_silu_and_mul,
    "aiter.ops.triton.activation.act_mul_and_fp8_group_quant": fused.act_mul_and_fp8_group_quant,
    "aiter.ops.triton.activation.act_mul_and_mxfp4_quant": fused.act_mul_and_mxfp4_quant,
    "aiter.ops.triton.gemm_afp4wfp4.gemm_afp4wfp4": mxfp4.gemm_afp4wfp4,
    "aiter.gemm_a4w4": mxfp4.gemm_a4w4,
    "aiter.ops.gemm_op_a4w4.gemm_a4w4_fake": mxfp4.gemm_a4w4,
    "aiter.utility.fp4_utils.e8m0_shuffle": mxfp4.e8m0_shuffle,
    "aiter.ops.shuffle.shuffle_weight_a16w4": mxfp4.shuffle_weight_a16w4,
    "aiter.ops.shuffle.shuffle_scale_a16w4": mxfp4.shuffle_scale_a16w4,
    "aiter.ops.quant.per_1x32_f4_quant_hip": mxfp4.per_1x32_f4_quant_hip,
    "aiter.ops.quant.per_token_quant_hip": rounding.per_token_quant_hip,
    "aiter.ops.quant.per_group_quant_hip": rounding.per_group_quant_hip,
    "aiter.ops.quant.per_tensor_quant_hip": rounding.per_tensor_quant_hip,
}
"""What models with quantized weights, or with groups of experts, call in addition to `SEMANTICS`."""
_MODULES = (
    *("aiter", "aiter.tuned_gemm", "aiter.fused_moe", "aiter.ops", "aiter.ops.shuffle", "aiter.ops.triton"),
    *("aiter.ops.triton.unified_attention", "aiter.ops.triton.fused_kv_cache", "aiter.mla"),
    *("aiter.ops.quant", "aiter.ops.gemm_op_a4w4", "aiter.utility", "aiter.utility.fp4_utils"),
    *(
        f"aiter.ops.triton.{name}"
        for name in ("fused_fp8_quant", "fused_mxfp4_quant", "activation", "gemm_afp4wfp4")
    ),
)
_ENUMERATIONS = {"ActivationType": moe.ActivationType, "QuantType": moe.QuantType}

Swap = tuple[str, str, str]
"""A function, and two of its arguments that a call confuses."""


def install(
    monkeypatch: pytest.MonkeyPatch,
    signatures: Mapping[str, str],
    swap: Swap | None = None,
    architecture: str = "gfx942",
    group: dist.ProcessGroup | None = None,
) -> Counter[str]:
    """Returns the number of calls of each function, which grows with them. `group`: ranks that sum.

    The ops' default order on a CPU becomes AITER, then torch, and AITER takes float32, in which generated ids
    can be compared.
    """
    calls: Counter[str] = Counter()
    modules = {name: ModuleType(name) for name in _MODULES}
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(modules[parent], own, module)
    vars(modules["aiter"]).update(_ENUMERATIONS)
    reduce.reset(group, "reg_ptr" in signatures["aiter.fused_allreduce_rmsnorm"])
    of_release = {name: each for name, each in reduce.SEMANTICS.items() if name in signatures}
    for name, semantics in (SEMANTICS | QUANTIZED | of_release).items():
        names = swap[1:] if swap and swap[0] == name else None
        _place(modules, name, _function(name, signatures[name], semantics, calls, names))
    monkeypatch.setattr(machine, "architecture", architecture)
    monkeypatch.setattr(aiter_impl, "architecture", lambda device: architecture)
    monkeypatch.setattr(aiter_impl, "DTYPES", (*aiter_impl.DTYPES, torch.float32))
    monkeypatch.setitem(backend._DEFAULT_ORDER, "cpu", ("aiter",))
    return calls


def _place(modules: Mapping[str, ModuleType], name: str, function: Callable[..., Any]) -> None:
    home = max((module for module in modules if name.startswith(f"{module}.")), key=len)
    *objects, own = name.removeprefix(f"{home}.").split(".")
    target: Any = modules[home]
    for each in objects:
        if not hasattr(target, each):
            setattr(target, each, SimpleNamespace())
        target = getattr(target, each)
    setattr(target, own, function)


def _function(
    name: str,
    signature: str,
    semantics: Callable[..., Any],
    calls: Counter[str],
    swapped: tuple[str, str] | None,
) -> Callable[..., Any]:
    bound_by = parsed(signature)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(bound_by.bind(*args, **kwargs).arguments)
        if swapped:
            first, second = swapped
            given[first], given[second] = given[second], given[first]
        calls[name] += 1
        return semantics(**given)

    call.__signature__ = bound_by  # type: ignore[attr-defined]
    return call
