"""FP8 experts that are stacked with inputs before outputs become those of tensors for each expert."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from atom_ops import BlockFP8, ChannelFP8, tensors_of
from parallel.communicator import Communicator
from tests.helpers.checkpoints.stacked_fp8 import ALONE, FAMILIES, STACKED, format_of, save_stacked
from tests.helpers.checkpoints.tiny_models import MAX_MODEL_LEN, checkpoint_of, hf_logits, prompt_of
from tests.helpers.engine.teacher_forcing import TinyWorker, forced_logits
from tests.helpers.parallel.thread_ranks import on_ranks
from workers.layers.context import BuildContext
from workers.layers.moe.moe import Experts
from workers.models.registry import build_model
from workers.weights.loader import WeightError, load_directory

IDS = prompt_of(40, seed=4)
CASES = [
    ("qwen3_vl_moe", "fp8, blocks"),
    ("llama4", "fp8, blocks"),
    ("llama4", "fbgemm_fp8"),
    ("qwen3_vl_moe", "fbgemm_fp8"),
]
WAYS = [(1, False), (2, False), (2, True)]
"""Ranks, and whether experts are spread over them."""

Saved = Callable[[str, str], tuple[torch.Tensor, Path]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Logits of the numbers, and the directory of both layouts."""

    @cache
    def make(family: str, format: str) -> tuple[torch.Tensor, Path]:
        directory = tmp_path_factory.mktemp("checkpoint")
        model = save_stacked(FAMILIES[family], format_of(format), directory)
        return hf_logits(model, IDS), directory

    return make


def logits(directory: Path, size: int, expert_parallel: bool) -> list[torch.Tensor]:
    """Logits of every position, on each rank."""

    def run(tp: Communicator) -> torch.Tensor:
        ours = TinyWorker(directory, tp=tp, expert_parallel=expert_parallel)
        core = ours.core()
        core.add(0, IDS)
        return forced_logits(ours.worker, core, 0, [25, 15])

    return on_ranks(size, run)


def experts(directory: Path, rank: int, size: int) -> list[Experts]:
    """The loaded experts of each layer."""
    context = BuildContext(torch.float32, torch.device("cpu"), Communicator(rank, size), MAX_MODEL_LEN)
    model = build_model(checkpoint_of(directory), context)
    load_directory(model, directory, lambda done, total: None)
    return [module for module in model.modules() if isinstance(module, Experts)]


@pytest.mark.parametrize(("family", "format"), CASES)
@pytest.mark.parametrize(("size", "expert_parallel"), WAYS)
def test_logits_are_those_of_tensors_for_each_expert(
    family: str, format: str, size: int, expert_parallel: bool, saved: Saved
) -> None:
    expected, directory = saved(family, format)
    assert expected.std() > 0.5
    alone = logits(directory / ALONE, size, expert_parallel)
    stacked = logits(directory / STACKED, size, expert_parallel)
    for found, wanted in zip(stacked, alone, strict=True):
        assert torch.equal(found, wanted)
        assert torch.equal(found.argmax(1), expected.argmax(1))
        torch.testing.assert_close(found, expected, atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize(("family", "format"), CASES)
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2)])
def test_weights_have_the_same_form(family: str, format: str, rank: int, size: int, saved: Saved) -> None:
    """What kernels of any device get does not depend on the layout of the files."""
    _, directory = saved(family, format)
    pairs = zip(experts(directory / STACKED, rank, size), experts(directory / ALONE, rank, size), strict=True)
    for stacked, alone in pairs:
        for found, wanted in ((stacked.gate_up, alone.gate_up), (stacked.down, alone.down)):
            assert isinstance(found, BlockFP8 if format == "fp8, blocks" else ChannelFP8)
            for ours, theirs in zip(tensors_of(found), tensors_of(wanted), strict=True):
                assert ours.dtype == theirs.dtype and ours.is_contiguous()
                assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def changed(directory: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change one tensor of the first layer's experts."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    (key,) = (each for each in tensors if each.endswith(f"layers.0.feed_forward.experts.{name}"))
    tensors[key] = change(tensors[key]).contiguous()
    save_file(tensors, path)


@pytest.mark.parametrize("shape", [(4, 512), (4, 512, 1)])
def test_scales_per_channel_may_have_another_axis(shape: tuple[int, ...], tmp_path: Path) -> None:
    save_stacked(FAMILIES["llama4"], format_of("fbgemm_fp8"), tmp_path)
    wanted = logits(tmp_path / STACKED, 1, False)
    changed(tmp_path / STACKED, "gate_up_proj_scale", lambda scales: scales.reshape(shape))
    assert torch.equal(logits(tmp_path / STACKED, 1, False)[0], wanted[0])


def test_fp8_with_outputs_first_is_refused(tmp_path: Path) -> None:
    save_stacked(FAMILIES["llama4"], format_of("fp8, blocks"), tmp_path)
    changed(tmp_path / STACKED, "gate_up_proj_scale_inv", lambda scales: scales.transpose(1, 2))
    words = r"gate_up_proj_scale_inv has shape \[4, 4, 2\]; the configuration needs \[4, 2, 4\]"
    with pytest.raises(WeightError, match=words):
        TinyWorker(tmp_path / STACKED)


def test_tensors_for_each_expert_in_other_formats(tmp_path: Path) -> None:
    """As compressed-tensors stores Llama 4."""
    model = save_stacked(FAMILIES["llama4"], format_of("compressed-tensors, channel"), tmp_path)
    expected = hf_logits(model, IDS)
    for size, expert_parallel in WAYS:
        for found in logits(tmp_path / ALONE, size, expert_parallel):
            torch.testing.assert_close(found, expected, atol=3e-4, rtol=1e-4)
