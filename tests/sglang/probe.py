"""A plugin of SGLang that writes down which model and attention a scheduler runs, for tests.sglang.generate.

A line of the file that ATOM_TEST_PROBE names: the modules of the model and of the attention backend, or what
RadixAttention was told of saving keys and values.
"""

import json
import os
from typing import Any

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"


def register() -> None:
    """The entry point: hooks around the start of a runner and around its attention layers."""
    if "ATOM_TEST_PROBE" not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_RUNNER}.init_attention_backends", _describe, HookType.AFTER)
    HookRegistry.register("sglang.srt.layers.radix_attention.RadixAttention.forward", _saves, HookType.BEFORE)


def _write(**facts: Any) -> None:
    with open(os.environ["ATOM_TEST_PROBE"], "a") as file:
        file.write(json.dumps(facts) + "\n")


def _describe(result: Any, runner: Any, *arguments: Any, **named: Any) -> None:
    hosted = getattr(runner.model, "_hosted", None)
    _write(
        model=f"{type(runner.model).__module__}/{'' if hosted is None else type(hosted.model).__module__}",
        backend=type(runner.attn_backend).__module__,
    )


_seen: set[bool] = set()


def _saves(
    layer: Any,
    q: Any,
    k: Any,
    v: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    *more: Any,
    **named: Any,
) -> None:
    if save_kv_cache not in _seen:
        _seen.add(save_kv_cache)
        _write(saves=save_kv_cache)
