"""Compiles the Triton kernels of steps before the first of them runs, on several threads.

Captures that are thrown away show which kernels steps launch. Nothing runs in a capture, so a kernel can be
missing.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from atom_ops import backend
from workers.batch.input_batch import InputBatch
from workers.batch.step_padding import pad_groups
from workers.graphs.decode_graphs import DecodeGraphs
from workers.graphs.graph_modes import GraphSettings
from workers.graphs.graph_recorder import GraphRecorder, Replay
from workers.layers.causal_lm import CausalLM
from workers.layers.context import CacheLayer, ForwardContext


class _DryRecorder:
    """A recorder of captures that must not be replayed."""

    runs_first = False

    def __init__(self, device: torch.device):
        self._recorder = GraphRecorder()
        self._kept: list[Replay] = []  # the pool of a graph lives as long as one of its graphs
        with self._recorder.capturing():
            ones = torch.ones(1, 1, dtype=torch.bfloat16, device=device)
            functional.linear(ones, ones)  # initialises cuBLAS, which a capture cannot

    def __call__(self, body: Callable[[], Any], name: str) -> tuple[Replay, Any]:
        with self._recorder.capturing():
            self._recorder.begin()
            result = body()
            self._kept.append(self._recorder.end())
        return _nothing, result


def _nothing() -> None:
    raise RuntimeError("this capture lacks kernels: it was made to compile them")


def compile_kernels(
    settings: GraphSettings,
    model: CausalLM,
    kv_layers: Sequence[CacheLayer],
    inputs: InputBatch,
    device: torch.device,
) -> int:
    """Compile the kernels of the steps to capture; returns how many were in no cache.

    If all of the largest steps were, smaller ones are not looked at.
    """
    record = _DryRecorder(device)

    def capture(rows: Sequence[int], prompts: Sequence[int]) -> int:
        return backend.compile_launched(device, partial(launch, rows, prompts))

    @torch.inference_mode()
    def launch(rows: Sequence[int], prompts: Sequence[int]) -> None:
        for num_drafts in settings.drafts:
            if rows:
                decode = DecodeGraphs(model, kv_layers, inputs, rows, record, device, num_drafts)
                decode.capture(lambda: None)
        for tokens in prompts:
            ids_T = torch.zeros(tokens, dtype=torch.int64, device=device)
            context = ForwardContext(kv_layers, pad_groups(inputs.empty_step().groups, tokens, 1))
            record(partial(model, ids_T, torch.zeros_like(ids_T), context), "prompt")

    prompts = settings.prompt_tokens
    first = capture(settings.rows[-1:], prompts[-1:])
    if not first:
        return 0
    return first + capture(_powers(settings.rows[:-1]), prompts[:-1])


def _powers(sizes: Sequence[int]) -> list[int]:
    """Those at which other plans of kernels may begin."""
    return [size for size in sizes if size & (size - 1) == 0]
