"""Compiles the Triton kernels of steps before the first of them runs, on several threads.

Captures that are thrown away show which kernels steps launch. Nothing runs in a capture, so a kernel can be
missing.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from atom_ops import StatePlan, backend, plan_attention
from workers.batch.input_batch import InputBatch
from workers.batch.step_padding import pad_groups
from workers.graphs.decode_graphs import DecodeGraphs
from workers.graphs.graph_modes import GraphSettings
from workers.graphs.graph_recorder import GraphRecorder, Replay
from workers.layers.causal_lm import CausalLM
from workers.layers.context import CacheLayer, ForwardContext, GroupContext


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
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # where every kernel was missing
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
            for cached in (0, inputs.limits.block_size):
                context = ForwardContext(kv_layers, _prompt_groups(inputs, tokens, cached, device))
                record(partial(model, ids_T, torch.zeros_like(ids_T), context), "prompt")

    prompts = settings.prompt_tokens
    first = capture(settings.rows[-1:], prompts[-1:])
    if not first:
        return 0
    return first + capture(_powers(settings.rows[:-1]), prompts[:-1])


def _powers(sizes: Sequence[int]) -> list[int]:
    """Those at which other plans of kernels may begin."""
    return [size for size in sizes if size & (size - 1) == 0]


def _prompt_groups(
    inputs: InputBatch, tokens: int, cached: int, device: torch.device
) -> list[GroupContext | StatePlan]:
    """Groups of a step of one prompt, of which `cached` tokens come before those that it computes.

    Its plans tell what to launch; no such block or slot needs to exist.
    """
    block_size = inputs.limits.block_size
    table = np.zeros((1, -(-(tokens + cached) // block_size)), np.int32)
    query_lens = np.array([tokens], np.int32)
    decode_query_len = 1 + inputs.limits.num_drafts
    plan = plan_attention(
        query_lens, query_lens + cached, table, device, inputs.split_tokens, decode_query_len
    )
    padded = pad_groups(inputs.empty_step().groups, tokens, 1)
    return [group if isinstance(group, StatePlan) else replace(group, plan=plan) for group in padded]
