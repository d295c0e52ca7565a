"""Environment variables: one typed table, read on access.

    from atom.shared.utils import envs

    if envs.ATOM_LOG_MORE: ...

A variable that is unset or empty has its default. A value that does not parse raises
ValueError on access. Nothing is cached.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from atom.shared.config.fields import ConfigError, parse_switch

Value = bool | int | str


class Area(Enum):
    """The part of the program that reads a variable; decides whether setting it can have an effect."""

    ENGINE = "engine"
    DATA_PARALLEL = "data parallelism over several hosts"
    GPU = "kernels for GPUs"
    ROCM = "AITER kernels on AMD GPUs"
    AITER = "AITER kernels"
    PLUGIN = "plugins"
    BENCHMARK = "benchmarks"


@dataclass(frozen=True)
class Variable:
    """One row of the table. A callable `default` is computed on access."""

    name: str
    kind: type[bool] | type[int] | type[str]
    default: Value | Callable[[], str]
    area: Area
    help: str

    def default_value(self) -> Value:
        """The value of the variable when it is unset."""
        return self.default() if callable(self.default) else self.default

    def parse(self, text: str) -> Value:
        """Raises ValueError that names the variable, the text and what is accepted."""
        if self.kind is bool:
            return self._parse_bool(text)
        if self.kind is int:
            return self._parse_int(text)
        return text

    def _parse_bool(self, text: str) -> bool:
        try:
            return parse_switch(text)
        except ConfigError as error:
            raise ValueError(f"{self.name}={error}") from None

    def _parse_int(self, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"{self.name}={text!r} is not a number: use a whole number") from None
        if value < 0:
            raise ValueError(f"{self.name}={text!r} is negative: use a whole number from 0 up")
        return value


def _cache_dir() -> str:
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise ValueError(
            "this user has no home directory: set ATOM_CACHE_DIR to a writable directory"
        ) from None
    return str(Path(base) / "atom")


def _on_rocm(name: str, default: bool, help_text: str) -> Variable:
    return Variable(name, bool, default, Area.ROCM, help_text)


VARIABLES: dict[str, Variable] = {
    variable.name: variable
    for variable in (
        Variable(
            "ATOM_CACHE_DIR",
            str,
            _cache_dir,
            Area.ENGINE,
            "Directory for converted checkpoints, measured GEMM plans, compiled kernels and Python files, "
            "and stacks of processes that hung. If unset: `atom` in XDG_CACHE_HOME or ~/.cache.",
        ),
        Variable(
            "ATOM_DISABLE_MMAP",
            bool,
            False,
            Area.ENGINE,
            "Read weight files instead of mapping them into memory, for file systems where mapping is slow.",
        ),
        Variable(
            "ATOM_KV_OFFLOAD_REMOTE_PASSWORD",
            str,
            "",
            Area.ENGINE,
            "Password for --kv-offload-remote-url.",
        ),
        Variable(
            "ATOM_LOG_MORE",
            bool,
            False,
            Area.ENGINE,
            "Log process id, file, line and function, and tracebacks of failures.",
        ),
        Variable(
            "ATOM_DP_SIZE",
            int,
            1,
            Area.DATA_PARALLEL,
            "Data parallel ranks of all hosts; on one host set --data-parallel-size.",
        ),
        Variable("ATOM_DP_RANK", int, 0, Area.DATA_PARALLEL, "Data parallel rank of this process."),
        Variable(
            "ATOM_DP_RANK_LOCAL",
            int,
            0,
            Area.DATA_PARALLEL,
            "Data parallel rank of this process on its host.",
        ),
        Variable(
            "ATOM_DP_MASTER_IP",
            str,
            "127.0.0.1",
            Area.DATA_PARALLEL,
            "Address at which the data parallel ranks meet.",
        ),
        Variable(
            "ATOM_DP_MASTER_PORT",
            int,
            29500,
            Area.DATA_PARALLEL,
            "TCP port at which the data parallel ranks meet.",
        ),
        Variable(
            "ATOM_DISABLE_VLLM_PLUGIN",
            bool,
            False,
            Area.PLUGIN,
            "Do not register with vLLM as a plugin.",
        ),
        Variable(
            "ATOM_DISABLE_VLLM_PLUGIN_ATTENTION",
            bool,
            False,
            Area.PLUGIN,
            "Keep vLLM's own attention, and register the rest of the plugin.",
        ),
        Variable(
            "ATOM_DISABLE_SGLANG_PLUGIN",
            bool,
            False,
            Area.PLUGIN,
            "Do not register with SGLang as a plugin.",
        ),
        Variable(
            "ATOM_DISABLE_SGLANG_PLUGIN_ATTENTION",
            bool,
            False,
            Area.PLUGIN,
            "Keep SGLang's own attention backends, and register the rest of the plugin.",
        ),
        _on_rocm("ATOM_USE_TRITON_GEMM", False, "MXFP4 GEMMs by AITER's Triton kernel instead of assembly."),
        Variable("ATOM_USE_TRITON_MXFP4_BMM", bool, False, Area.AITER, "FP4 batched GEMMs in MLA."),
        Variable(
            "ATOM_ENABLE_ALLREDUCE_RMSNORM_FUSION",
            bool,
            True,
            Area.GPU,
            "One kernel for the tensor parallel all-reduce and the following norm.",
        ),
        Variable(
            "ATOM_ENABLE_DS_INPUT_RMSNORM_QUANT_FUSION",
            bool,
            True,
            Area.GPU,
            "DeepSeek: one kernel for the input norm and quantization.",
        ),
        Variable(
            "ATOM_ENABLE_DS_QKNORM_FUSION",
            bool,
            True,
            Area.ENGINE,
            "DeepSeek: one kernel for the norms of query and key in MLA attention.",
        ),
        _on_rocm(
            "ATOM_ENABLE_DS_QKNORM_QUANT_FUSION",
            True,
            "DeepSeek, with ATOM_ENABLE_DS_QKNORM_FUSION: one kernel for the norm of the queries' latents "
            "and their quantization.",
        ),
        _on_rocm(
            "ATOM_ENABLE_QK_NORM_ROPE_CACHE_QUANT_FUSION",
            False,
            "Qwen3-MoE: ATOM's attention instead of AITER's: one kernel normalises queries and keys, applies "
            "RoPE and writes the KV cache, also a quantized one.",
        ),
        Variable(
            "ATOM_ROPE_FUSED_QKNORM",
            bool,
            False,
            Area.ROCM,
            "Qwen3-MoE: the same. In SGLang, with ATOM's attention, on every device and for every family: "
            "one op normalises queries and keys, applies RoPE and writes the KV cache.",
        ),
        Variable(
            "ATOM_LLAMA_ENABLE_AITER_TRITON_FUSED_RMSNORM_QUANT",
            bool,
            True,
            Area.GPU,
            "Llama: one Triton kernel for norm and quantization.",
        ),
        Variable(
            "ATOM_LLAMA_ENABLE_AITER_TRITON_FUSED_SILU_MUL_QUANT",
            bool,
            True,
            Area.GPU,
            "Llama: one Triton kernel for the gated activation and quantization.",
        ),
        Variable(
            "ATOM_DUAL_STREAM_MOE_TOKEN_THRESHOLD",
            int,
            1024,
            Area.GPU,
            "Shared experts run in parallel with the routed ones, on a second stream, in steps of up to this "
            "many tokens; 0 never. With --enable-expert-parallel they run after them.",
        ),
        Variable(
            "ATOM_OVERLAP_ALLREDUCE_TOKENS",
            int,
            8192,
            Area.GPU,
            "Dense models on two tensor-parallel NVIDIA GPUs of one host: steps of at least this many tokens "
            "run in parts, and copy engines move the partial sums of each during the GEMMs "
            "of others; 0 never. Not with --level 1 or 2.",
        ),
        Variable(
            "ATOM_ALL2ALL_PADDED_TOKENS",
            int,
            0,
            Area.ENGINE,
            "--all2all-backend auto: steps of up to this many tokens over all ranks return the experts' sums "
            "by a direct exchange, larger ones by reduce-scatter.",
        ),
        Variable(
            "ATOM_ALL2ALL_EAGER_TOKENS",
            int,
            32768,
            Area.ENGINE,
            "--all2all-backend auto: steps without a graph of at least this many tokens over all ranks send "
            "a token only to the ranks of its experts.",
        ),
        Variable(
            "ATOM_PROFILER_MORE",
            bool,
            False,
            Area.ENGINE,
            "Add shapes, stacks and memory to profiler traces; much slower.",
        ),
        Variable("OPENAI_API_KEY", str, "", Area.BENCHMARK, "API key that benchmarks send to the server."),
        Variable(
            "VLLM_USE_MODELSCOPE",
            bool,
            False,
            Area.BENCHMARK,
            "Benchmarks download tokenizers from ModelScope.",
        ),
        Variable(
            "SAVE_TO_PYTORCH_BENCHMARK_FORMAT",
            bool,
            False,
            Area.BENCHMARK,
            "Benchmarks also save results in PyTorch's format.",
        ),
    )
}


def __getattr__(name: str) -> Any:
    variable = VARIABLES.get(name)
    if variable is None:
        raise AttributeError(f"module 'atom.shared.utils.envs' has no variable {name!r}")
    text = os.environ.get(name, "")
    return variable.parse(text) if text else variable.default_value()


def __dir__() -> list[str]:
    return [*globals(), *VARIABLES]


def is_set(name: str) -> bool:
    """Whether the variable is set; raises KeyError for an unknown variable."""
    return bool(os.environ.get(VARIABLES[name].name))


def startup_notes(device: str, rocm: bool = False) -> list[str]:
    """One line for each variable that is set away from its default and has no effect on `device`.

    `device` is cpu or cuda; `rocm`: whether GPUs are AMD's. Raises ValueError for a value that does not
    parse.
    """
    notes = []
    for name, variable in VARIABLES.items():
        value = __getattr__(name)  # parses every variable: typing errors are reported at start
        reason = _no_effect(variable.area, device, rocm)
        if reason and is_set(name) and value != variable.default_value():
            notes.append(f"{name}={os.environ[name]} has no effect: {reason}")
    return notes


def acts(area: Area) -> bool:
    """Whether this version reads the variables of an area."""
    return area is not Area.AITER


def _no_effect(area: Area, device: str, rocm: bool) -> str:
    """Why variables of an area have no effect on an engine; empty when they act or are for other programs."""
    if area is Area.GPU and device == "cpu":
        return "its kernels are for GPUs, and this engine computes on the CPU"
    if area in (Area.ROCM, Area.AITER) and not (device == "cuda" and rocm):
        place = "the CPU" if device == "cpu" else "NVIDIA GPUs"
        return f"AITER's kernels are for AMD GPUs, and this engine computes on {place}"
    if acts(area):
        return ""
    return f"this version has no {area.value} yet"
