"""Stand-ins of the modules of SGLang that the plugin imports, as far as it uses them."""

import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

PLUGIN = "atom.plugin.sglang"
HOOKED = ("MHATokenToKVPool._create_buffers_normal", "MLATokenToKVPool._create_buffers")


class AttentionType(Enum):
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class Mode(Enum):
    """SGLang's ForwardMode."""

    EXTEND = 1
    DECODE = 2
    IDLE = 4
    TARGET_VERIFY = 5

    def is_decode_or_idle(self) -> bool:
        return self in (Mode.DECODE, Mode.IDLE)

    def is_extend_or_draft_extend_or_mixed(self) -> bool:
        return self is Mode.EXTEND


class Host:
    """What the plugin registered, and the settings that it reads."""

    def __init__(self, version: str = "0.5.23"):
        self.version = version
        self.args = SimpleNamespace(
            model_path="/nowhere", load_format="auto", context_length=None, is_embedding=False, page_size=4,
            tp_size=1, pp_size=1, ep_size=1, enable_dp_attention=False, enable_eplb=False, enable_lora=None,
            enable_two_batch_overlap=False, enable_memory_saver=False, enable_hierarchical_cache=False,
            speculative_algorithm=None, disaggregation_mode="null", attention_backend="atom",
            prefill_attention_backend=None, decode_attention_backend=None,
        )  # fmt: skip
        self.choices = ["triton", "aiter"]
        self.backends: dict[str, Any] = {}
        self.hooks: dict[str, list[Any]] = {}
        self.models: dict[str, Any] = {}
        self.packages: list[tuple[str, bool, bool]] = []
        self.attn_backend: Any = None
        """The backend of the current forward pass."""
        self.saved: list[bool] = []
        """What RadixAttention was told of saving keys and values."""

    def register_attention_backend(self, name: str) -> Any:
        return lambda make: self.backends.__setitem__(name, make)

    def register_hook(self, target: str, hook: Any, kind: str) -> None:
        assert kind == "around"
        self.hooks.setdefault(target, []).append(hook)

    def register_package(self, package: str, overwrite: bool = False, strict: bool = False) -> None:
        self.packages.append((package, overwrite, strict))

    def modules(self) -> dict[str, dict[str, Any]]:
        srt = "sglang.srt"
        variable = _Variable()
        return {
            "sglang": {},
            "sglang.version": {"__version__": self.version},
            f"{srt}.environ": {"envs": SimpleNamespace(SGLANG_EXTERNAL_MODEL_PACKAGE=variable)},
            f"{srt}.arg_groups.overrides": {
                "resolved_view": lambda args: args,
                "attention_backends_of": lambda args: (
                    args.prefill_attention_backend or args.attention_backend,
                    args.decode_attention_backend or args.attention_backend,
                ),
            },
            f"{srt}.server_args": {
                "ATTENTION_BACKEND_CHOICES": self.choices,
                "add_attention_backend_choices": self.choices.extend,
            },
            f"{srt}.runtime_context": {"get_server_args": lambda: self.args},
            f"{srt}.distributed": {
                "get_tp_group": lambda: SimpleNamespace(rank_in_group=0, world_size=1, device_group=None)
            },
            f"{srt}.models.registry": {
                "ModelRegistry": SimpleNamespace(register=self.register_package, models=self.models)
            },
            f"{srt}.plugins.hook_registry": {
                "HookRegistry": SimpleNamespace(register=self.register_hook),
                "HookType": SimpleNamespace(AROUND="around"),
            },
            f"{srt}.layers.attention.attention_registry": {
                "register_attention_backend": self.register_attention_backend
            },
            f"{srt}.layers.attention.base_attn_backend": {"AttentionBackend": object},
            f"{srt}.layers.radix_attention": {
                "AttentionType": AttentionType,
                "RadixAttention": radix_attention(self),
            },
            f"{srt}.layers.logits_processor": {"LogitsProcessor": LogitsProcessor},
            f"{srt}.model_executor.forward_context": {"get_attn_backend": lambda: self.attn_backend},
        }


class _Variable:
    def __init__(self) -> None:
        self.value = ""

    def get(self) -> str:
        return self.value

    def set(self, value: str) -> None:
        self.value = value


class LogitsProcessor(nn.Module):
    """Logits of all tokens."""

    def __init__(self, config: Any, skip_all_gather: bool):
        super().__init__()

    def forward(self, input_ids: Any, hidden: torch.Tensor, lm_head: Any, batch: Any) -> torch.Tensor:
        logits: torch.Tensor = lm_head.quant_method.apply(lm_head, hidden, None)
        return logits


def radix_attention(host: Host) -> type[nn.Module]:
    """SGLang's layer, which calls the backend of the current forward pass."""

    class RadixAttention(nn.Module):
        def __init__(
            self, heads: int, head_dim: int, scaling: float, num_kv_heads: int, layer_id: int, **more: Any
        ):
            super().__init__()
            self.tp_q_head_num = heads
            self.tp_k_head_num = num_kv_heads
            self.head_dim = head_dim
            self.v_head_dim = head_dim
            self.scaling = scaling
            self.layer_id = layer_id
            self.logit_cap = 0.0
            self.is_cross_attention = False
            self.attn_type = AttentionType.DECODER
            self.sliding_window_size = more.get("sliding_window_size", -1)

        def forward(
            self, q: Any, k: Any, v: Any, batch: Any, save_kv_cache: bool = True, **more: Any
        ) -> torch.Tensor:
            host.saved.append(save_kv_cache)
            decode = batch.forward_mode is Mode.DECODE
            backend = host.attn_backend
            run = backend.forward_decode if decode else backend.forward_extend
            out: torch.Tensor = run(q, k, v, self, batch, save_kv_cache=save_kv_cache, **more)
            return out

    return RadixAttention


def install(monkeypatch: pytest.MonkeyPatch, host: Host) -> None:
    """Make the stand-ins importable, and import the plugin anew, for the time of a test."""
    for name in [name for name in sys.modules if name.startswith(f"{PLUGIN}.")]:
        monkeypatch.delitem(sys.modules, name)
    for name, content in host.modules().items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


def make_pool(size: int = 30, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """SGLang's pool of two layers with two heads of 16 features, before it has buffers."""
    fields = {
        "size": size, "page_size": 4, "dtype": dtype, "device": "cpu", "layer_num": 2, "start_layer": 0,
        "store_dtype": torch.uint8 if dtype == torch.float8_e4m3fn else dtype, "kv_cache_layout": "nhd",
        "head_num": 2, "head_dim": 16, "v_head_dim": 16,
    }  # fmt: skip
    return SimpleNamespace(**fields | changes)


def batch_of(mode: Mode, slots_RT: torch.Tensor, contexts: list[int], queries: list[int]) -> Any:
    """SGLang's ForwardBatch: the last `queries` of `contexts` tokens of each request."""
    ends = zip(contexts, queries, strict=True)
    own = [slots_RT[row, context - length : context] for row, (context, length) in enumerate(ends)]
    return SimpleNamespace(
        forward_mode=mode,
        req_pool_indices=torch.arange(len(contexts)),
        seq_lens=torch.tensor(contexts),
        seq_lens_cpu=torch.tensor(contexts),
        extend_seq_lens_cpu=queries if mode is Mode.EXTEND else None,
        out_cache_loc=torch.cat(own).long(),
    )
