"""Measures the memory that a rank needs besides the KV cache; what is left is for the KV cache."""

import torch

from atom.shared.messages.worker import ScheduledBatch
from workers.memory.largest_steps import largest_steps, num_blocks, profile_batch
from workers.runner_builder import RunnerBuilder
from workers.vision.image_store import ImageStore
from workers.warm_up import run_step


def peak_bytes(builder: RunnerBuilder) -> int:
    """Peak memory that torch allocates on this GPU without KV: in the largest steps, and for graphs."""
    shapes = largest_steps(builder.most_tokens, builder.max_rows, builder.longest_sequence)
    peaks = [_step_bytes(builder, counts) for counts in shapes]
    kept = 0
    if builder.images is not None:
        peaks.append(_image_bytes(builder, builder.images))
        kept = builder.images.max_bytes
    return max(peaks) + _graph_bytes(builder) + kept


def _image_bytes(builder: RunnerBuilder, images: ImageStore) -> int:
    """Peak memory of encoding the largest image."""
    torch.cuda.reset_peak_memory_stats(builder.device)
    images.encode_largest()
    peak = torch.cuda.max_memory_allocated(builder.device)
    torch.cuda.empty_cache()
    return peak


def _step_bytes(builder: RunnerBuilder, counts: list[int]) -> int:
    """Peak memory of a step that computes `counts[i]` tokens of row i."""
    groups = builder.model.kv_groups
    block_size = builder.config.block_tokens
    longest = builder.longest_sequence
    batch = profile_batch(counts, groups, block_size, builder.checkpoint.vocab_size, longest)
    before = torch.cuda.memory_allocated(builder.device)
    blocks = num_blocks(counts, groups, block_size)
    kv_layers = builder.kv_layers(blocks)
    kv_bytes = torch.cuda.memory_allocated(builder.device) - before
    runner = builder.runner(kv_layers, builder.inputs(longest, blocks), [])
    torch.cuda.reset_peak_memory_stats(builder.device)
    run_step(runner, batch)
    if drafts := builder.num_drafts:
        rows = max(builder.most_tokens // (1 + drafts), 1)
        run_step(runner, ScheduledBatch(-1, batch.rows[:rows], num_drafts=drafts))
    peak = torch.cuda.max_memory_allocated(builder.device) - kv_bytes
    del runner, kv_layers
    torch.cuda.empty_cache()
    return peak


def _graph_bytes(builder: RunnerBuilder) -> int:
    """Memory of the captured graphs: smaller ones reuse the memory of the largest."""
    sizes = builder.capture_sizes
    if not sizes:
        return 0
    blocks = [1] * len(builder.model.kv_groups)
    kv_layers = builder.kv_layers(blocks)
    inputs = builder.inputs(builder.longest_sequence, blocks)
    before = torch.cuda.memory_reserved(builder.device)
    graphs = builder.graphs(kv_layers, inputs, sizes, largest_alone=True)
    graph_bytes = torch.cuda.memory_reserved(builder.device) - before
    del graphs, inputs, kv_layers
    torch.cuda.empty_cache()
    return graph_bytes
