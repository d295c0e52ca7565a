"""What the plugin uses of vLLM, read in the wheels of its versions without installing them.

A check fails by the name of the file, class, member or parameter that a version lacks.
"""

import ast
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from atom.plugin.vllm.host_version import misfit

FUNCTIONS = {
    "platforms/__init__.py": {"builtin_platform_plugins": ()},
    "utils/import_utils.py": {"resolve_obj_by_qualname": ("qualname",)},
    "logger.py": {"init_logger": ("name",)},
    "forward_context.py": {"get_forward_context": ()},
    "distributed/parallel_state.py": {"get_tp_group": ()},
    "v1/attention/backends/registry.py": {"register_backend": ("backend", "class_path")},
}
"""File -> functions or variables, with parameters."""
_CLASSES = {
    "v1/attention/backends/registry.py": {"AttentionBackendEnum": ("CUSTOM", "get_path")},
    "forward_context.py": {"ForwardContext": ("attn_metadata",)},
    "distributed/parallel_state.py": {
        "GroupCoordinator": ("rank_in_group", "world_size", "device_group", "all_reduce")
    },
    "model_executor/models/interfaces_base.py": {
        "VllmModel": ("embed_input_ids", "forward"),
        "VllmModelForTextGeneration": ("compute_logits",),
    },
    "model_executor/layers/attention/attention.py": {
        "Attention": ("num_heads", "num_kv_heads", "head_size", "forward")
    },
    "v1/kv_cache_interface.py": {
        "KVCacheSpec": ("block_size",),
        "AttentionSpec": ("num_kv_heads", "head_size", "dtype"),
        "SlidingWindowSpec": ("sliding_window",),
        "FullAttentionSpec": (),
        "MLAAttentionSpec": (),
    },
    "v1/attention/backend.py": {
        "CommonAttentionMetadata": (
            *("query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu_upper_bound", "num_reqs"),
            *("num_actual_tokens", "max_query_len", "max_seq_len", "block_table_tensor", "slot_mapping"),
        ),
    },
    "config/parallel.py": {
        "ParallelConfig": (
            *("pipeline_parallel_size", "decode_context_parallel_size", "data_parallel_size"),
            *("enable_expert_parallel", "enable_eplb", "enable_dbo"),
        )
    },
    "config/model.py": {
        "ModelConfig": (
            *("model", "hf_config", "dtype", "max_model_len", "enable_prompt_embeds", "runner_type"),
            *("architectures", "get_num_attention_heads"),
        )
    },
    "config/cache.py": {"CacheConfig": ("block_size", "cache_dtype")},
    "config/load.py": {"LoadConfig": ("load_format",)},
    "config/speculative.py": {"SpeculativeConfig": ("method", "num_speculative_tokens")},
    "config/compilation.py": {"CompilationConfig": ("static_forward_context",)},
    "config/vllm.py": {
        "VllmConfig": ("additional_config", "lora_config", "speculative_config", "load_config")
    },
}
"""File -> classes, with members."""
_METHODS = {
    "platforms/interface.py": {"Platform.get_attn_backend_cls": ("selected_backend",)},
    "model_executor/models/registry.py": {"_ModelRegistry.register_model": ("model_arch", "model_cls")},
    "model_executor/layers/attention_layer_base.py": {
        "AttentionLayerBase.get_attn_backend": (),
        "AttentionLayerBase.get_kv_cache_spec": ("vllm_config",),
    },
    "model_executor/layers/attention/attention.py": {
        "Attention.__init__": (
            *("num_heads", "head_size", "scale", "num_kv_heads", "cache_config"),
            *("per_layer_sliding_window", "prefix"),
        ),
    },
    "v1/attention/backend.py": {
        "AttentionMetadataBuilder.__init__": ("kv_cache_spec", "layer_names", "vllm_config", "device"),
        "AttentionMetadataBuilder.build": ("common_prefix_len", "common_attn_metadata", "fast_build"),
        "AttentionImpl.__init__": (
            *("num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window"),
            *("kv_cache_dtype", "logits_soft_cap", "attn_type", "kv_sharing_target_layer_name"),
        ),
        "AttentionImpl.forward": ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
    },
}
"""File -> methods, with parameters."""
_TEXTS = {"plugins/__init__.py": ("vllm.general_plugins", "vllm.platform_plugins")}
_BACKEND_METHODS = {"get_name", "get_impl_cls", "get_builder_cls", "get_kv_cache_shape"}
"""The abstract methods of a backend that ATOM's has."""
_SHAPE = ("num_blocks", "block_size", "num_kv_heads", "head_size", "cache_dtype_str")


class Wheel:
    """The modules of a wheel's package vllm."""

    def __init__(self, path: Path):
        self._archive = zipfile.ZipFile(path)
        self._trees: dict[str, ast.Module] = {}

    def text(self, file: str) -> str:
        """The source of a module; empty if there is none."""
        name = f"vllm/{file}"
        return self._archive.read(name).decode() if name in self._archive.namelist() else ""

    def tree(self, file: str) -> ast.Module:
        """The module's statements, those of a missing one are none."""
        if file not in self._trees:
            self._trees[file] = ast.parse(self.text(file))
        return self._trees[file]

    def found(self, file: str, name: str) -> ast.AST | None:
        """A function, class or variable of the module, or a method as Class.method."""
        body: list[ast.stmt] = self.tree(file).body
        where: ast.AST | None = None
        for part in name.split("."):
            where = next((each for each in body if part in _names(each)), None)
            body = where.body if isinstance(where, ast.ClassDef) else []
        return where


def check_contracts(wheels: Path | None) -> dict[str, list[str]]:
    """What each wheel of the directory lacks, by its name."""
    if wheels is None:
        return {"contract": ["--wheels names no directory"]}
    paths = sorted(wheels.glob("vllm*.whl"))
    if not paths:
        return {"contract": [f"{wheels} has no wheel of vLLM"]}
    return {f"contract, {path.name.rsplit('-', 3)[0]}": list(missing(path)) for path in paths}


def missing(path: Path) -> Iterator[str]:
    """Every name that the plugin uses and the wheel lacks."""
    if problem := misfit(path.name.split("-")[1]):
        yield problem
    wheel = Wheel(path)
    for file, texts in _TEXTS.items():
        yield from (f"{file}: {text}" for text in texts if text not in wheel.text(file))
    for table in (FUNCTIONS, _METHODS):
        for file, names in table.items():
            yield from _without_parameters(wheel, file, names)
    for file, classes in _CLASSES.items():
        for name, members in classes.items():
            has = _members(wheel.found(file, name))
            yield from (f"{file}: {name}.{member}" for member in members if member not in has)
            if not has:
                yield f"{file}: {name}"
    yield from _without_layout(wheel)


def _without_layout(wheel: Wheel) -> Iterator[str]:
    """The two ways to say the layout of a KV cache, of which a version has one."""
    file = "v1/attention/backend.py"
    specs = "v1/kv_cache_interface.py"
    backend = wheel.found(file, "AttentionBackend")
    assert isinstance(backend, ast.ClassDef), file
    yield from (
        f"{file}: AttentionBackend.{method.name} is abstract"
        for method in backend.body
        if isinstance(method, ast.FunctionDef)
        and "abstractmethod" in map(ast.unparse, method.decorator_list)
        and method.name not in _BACKEND_METHODS
    )
    fields = _members(wheel.found(specs, "AttentionSpec"))
    if "get_kv_cache_shape" in _members(backend):
        yield from _without_parameters(wheel, file, {"AttentionBackend.get_kv_cache_shape": _SHAPE})
        return
    yield from (
        f"{specs}: AttentionSpec.{name}"
        for name in ("num_head_slots", "state_content_bytes")
        if name not in fields
    )
    layouts = _members(wheel.found("v1/kv_cache_layout.py", "KVCacheLayout"))
    yield from (f"KVCacheLayout.{name}" for name in ("LBHNC", "LBNHC") if name not in layouts)
    if "supported_kv_cache_layouts" not in _members(backend):
        yield f"{file}: AttentionBackend.supported_kv_cache_layouts"


def _without_parameters(wheel: Wheel, file: str, names: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    for name, parameters in names.items():
        found = wheel.found(file, name)
        if found is None:
            yield f"{file}: {name}"
        elif isinstance(found, ast.FunctionDef):
            has = [each.arg for each in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)]
            yield from (f"{file}: {name}({wanted})" for wanted in parameters if wanted not in has)


def _members(found: ast.AST | None) -> set[str]:
    """Fields and methods of a class, and what its methods assign to self."""
    if not isinstance(found, ast.ClassDef):
        return set()
    own = {name for each in found.body for name in _names(each)}
    assigned = {
        node.attr
        for node in ast.walk(found)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    }
    return own | assigned


def _names(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
    return []
