"""DeepSeek-V4 as published: names without `model.`, FP8 in blocks, experts in MXFP4; and what is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, save_file
from transformers import AutoModelForCausalLM

from atom.shared.config.speculative import SpeculativeConfig
from parallel.communicator import Communicator
from tests.helpers.checkpoints.fp8 import CONFIG, numbers, quantized
from tests.helpers.checkpoints.mxfp4 import packed_experts
from tests.helpers.checkpoints.tiny_models import (
    MAX_MODEL_LEN,
    Tiny,
    checkpoint_of,
    engine_config,
    hf_logits,
    place,
    prompt_of,
    save_tiny,
    tiny,
)
from tests.helpers.engine.drafting import check_output
from tests.helpers.engine.teacher_forcing import TinyWorker, forced_logits
from tests.helpers.engine.whole_engine import WholeEngine
from tests.helpers.parallel.thread_ranks import on_ranks
from workers.layers.context import BuildContext
from workers.models.registry import build_model
from workers.worker import Worker

IDS = prompt_of(150, seed=4)
_NAMES = {
    r"^model\.(layers|norm)\.": r"\1.",
    r"^model\.embed_tokens\.": "embed.",
    r"^model\.hc_head\.hc_": "hc_head_",
    r"\.attn\.norm\.": ".attn.kv_norm.",
}
_EXPERT = re.compile(r"\.ffn\.experts\.\d+\.w[123]\.weight$")
_BLOCKS = re.compile(r"\.(attn\.w\w+|indexer\.wq_b|shared_experts\.w[123])\.weight$")
_SIZES = {
    "hidden_size": 64, "intermediate_size": 256, "head_dim": 64, "q_lora_rank": 128, "o_lora_rank": 128,
    "compress_rates": None, "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
}  # fmt: skip

OTHER = Tiny("other", "deepseek_v4", 3, tiny("deepseek-v4").config | {
    "num_experts_per_tok": 5, "num_attention_heads": 9, "o_groups": 3, "head_dim": 24, "hc_mult": 2,
    "hc_sinkhorn_iters": 3, "index_n_heads": 19, "index_topk": 5, "sliding_window": 12, "swiglu_limit": 0.7,
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 32},
    "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"] * 2,
    "mlp_layer_types": ["moe", "hash_moe", "moe", "moe"],
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32,
    },
})  # fmt: skip
"""Three groups of heads, two streams, one block in two for an entry, and YaRN."""


def published(directory: Path) -> torch.nn.Module:
    """Save a checkpoint as it is published; returns transformers' model of the dequantized numbers."""
    save_tiny(Tiny("published", "deepseek_v4", 1, tiny("deepseek-v4").config | _SIZES), directory)
    file = directory / "model.safetensors"
    stored: dict[str, torch.Tensor] = {}
    plain = load(file.read_bytes())
    packed, values = packed_experts({name: plain[name].t()[None] for name in plain if _EXPERT.search(name)})
    for name, tensor in dict(plain).items():
        scale = name.removesuffix("weight") + "scale"
        if _EXPERT.search(name):
            plain[name] = values[name][0].t().contiguous()
            stored[name] = packed[f"{name}_blocks"][0].flatten(1).view(torch.int8)
            stored[scale] = packed[f"{name}_scales"][0].view(torch.float8_e8m0fnu)
        elif _BLOCKS.search(name):
            stored[name], scales = quantized(tensor)
            stored[scale] = torch.exp2(scales.log2().ceil()).to(torch.float8_e8m0fnu)
            plain[name] = numbers(stored[name], stored[scale].float())
        else:
            stored[name] = tensor
    save_file(plain, file, metadata={"format": "pt"})
    reference: torch.nn.Module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    stored = {_published_name(name): tensor for name, tensor in stored.items()}
    save_file({**stored, "mtp.0.norm.weight": torch.ones(64)}, file, metadata={"format": "pt"})
    _publish_config(directory / "config.json")
    return reference


def _published_name(name: str) -> str:
    for pattern, replacement in _NAMES.items():
        name = re.sub(pattern, replacement, name)
    return name


def _publish_config(path: Path) -> None:
    """The settings under their older names."""
    config: dict[str, Any] = json.loads(path.read_text())
    for name in (
        "layer_types",
        "mlp_layer_types",
        "compress_rates",
        "rope_parameters",
        "partial_rotary_factor",
    ):
        del config[name]
    config |= {
        "compress_ratios": [0, 128, 4, 4, 0],  # the last one is of the layer for multi-token prediction
        "num_hash_layers": 1,
        "rope_scaling": None,
        "expert_dtype": "fp4",
        "quantization_config": {**CONFIG, "scale_fmt": "ue8m0"},
    }
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("size", [1, 2])
def test_a_published_checkpoint_has_the_logits_of_its_numbers(tmp_path: Path, size: int) -> None:
    expected = hf_logits(published(tmp_path), IDS)
    for found in logits_on_ranks(tmp_path, size):
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def logits_on_ranks(directory: Path, size: int) -> list[torch.Tensor]:
    """Logits [T, V] in two chunks, on each rank."""

    def run(tp: Communicator) -> torch.Tensor:
        ours = TinyWorker(directory, tp=tp)
        core = ours.core()
        core.add(0, IDS)
        return forced_logits(ours.worker, core, 0, [70, 80])

    return on_ranks(size, run)


@pytest.mark.parametrize("size", [1, 3])
def test_other_sizes_have_the_logits_of_transformers(tmp_path: Path, size: int) -> None:
    model, _ = save_tiny(OTHER, tmp_path)
    expected = hf_logits(model, IDS)
    for found in logits_on_ranks(tmp_path, size):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def refused(directory: Path, message: str, ranks: int = 1, **fields: Any) -> None:
    """`fields` are those of the `BuildContext`."""
    build = BuildContext(torch.float32, torch.device("cpu"), Communicator(0, ranks), MAX_MODEL_LEN, **fields)
    with pytest.raises(ValueError, match=message):
        build_model(checkpoint_of(directory), build)


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    save_tiny(tiny("deepseek-v4"), tmp_path)
    refused(tmp_path, r"--kv-cache-dtype: deepseek_v4 .* omit the flag", kv_dtype=torch.float8_e4m3fn)
    refused(tmp_path, r"--tensor-parallel-size 3 does not fit o_groups 2: it must be at most 2", ranks=3)
    refused(tmp_path, r"--block-size 6 does not fit .*: it must be a multiple of 4", block_size=6)
    config = json.loads((tmp_path / "config.json").read_text())
    config["layer_types"][0] = "full_attention"
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(tmp_path, "deepseek_v4 with layers .*full_attention.* is not supported")


def add_prediction(directory: Path) -> None:
    """A layer for multi-token prediction, with the attention of the first layer and experts of the second."""
    file = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    for name, tensor in dict(tensors).items():
        if (name.startswith("layers.0.") and ".ffn." not in name) or name.startswith("layers.1.ffn."):
            tensors[f"mtp.0.{name.split('.', 2)[2]}"] = tensor.clone()
    hidden = _SIZES["hidden_size"]
    generator = torch.Generator().manual_seed(2)
    for name in ("enorm", "hnorm", "norm"):
        tensors[f"mtp.0.{name}.weight"] = torch.ones(hidden)
    for name in ("e_proj", "h_proj"):
        values, scales = quantized(torch.randn(hidden, hidden, generator=generator))
        tensors[f"mtp.0.{name}.weight"] = values
        tensors[f"mtp.0.{name}.scale"] = torch.exp2(scales.log2().ceil()).to(torch.float8_e8m0fnu)
    for name in ("fn", "base", "scale"):
        tensors[f"mtp.0.hc_head_{name}"] = tensors[f"hc_head_{name}"].clone()
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_published_layer_drafts(tmp_path: Path) -> None:
    published(tmp_path)
    add_prediction(tmp_path)
    # Whether a random layer's drafts are right does not matter.
    check_output(checkpoint_of(tmp_path), SpeculativeConfig("mtp", 2), least=-1.0)


def test_a_layer_with_compressed_attention_does_not_draft(tmp_path: Path) -> None:
    save_tiny(tiny("deepseek-v4"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["layer_types"].append("compressed_sparse_attention")
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(tmp_path, "--method mtp: a layer .* with sparse compressed attention is not supported", mtp=True)


def test_rows_at_their_limits_need_no_blocks(tmp_path: Path) -> None:
    """Drafts are accepted up to the last token, while the next step is in flight: it computes padding."""
    _, checkpoint = save_tiny(tiny("deepseek-v4"), tmp_path)
    speculative = SpeculativeConfig("suffix", 4, spec_decode_adaptive=False)
    config = replace(engine_config(block_size=16), speculative=speculative)
    made = WholeEngine(Worker(config, checkpoint, place(), lambda *progress: None), 40, max_tokens=64)
    for number in range(2):  # the second output is looked up in the first
        made.add(number, [5, 6, 7, 8] * 3, 12)
        made.run()
    assert made.outputs[0].token_ids == made.outputs[1].token_ids
    assert sum(made.core.stats().num_accepted_tokens_per_pos) > 4
