"""MLA models in a worker: cache sizes, absorbed and expanded attention, refused configurations."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from atom.shared.messages.worker import FullAttentionSpec
from atom_ops import TokenShard
from atom_ops.op import REGISTRY
from parallel.communicator import Communicator
from tests.helpers.checkpoints.tiny_models import prompt_of, save_tiny, tiny
from tests.helpers.engine.teacher_forcing import TinyWorker, forced_logits
from tests.helpers.source import ROOT
from workers.checkpoint.hf_config import read_config
from workers.checkpoint.hf_directory import normalised_config
from workers.layers.context import BuildContext
from workers.layers.mla import mla
from workers.memory.kv_cache import allocate_kv, kv_specs
from workers.models.deepseek_v2 import DeepseekV2ForCausalLM
from workers.models.deepseek_v3 import DeepseekV3ForCausalLM

IDS = prompt_of(40, seed=3)
META = torch.device("meta")


def real_config(**changes: Any) -> dict[str, Any]:
    """DeepSeek-V3's published config.json."""
    directory = ROOT / "benchmarks/models/DeepSeek-V3"
    return normalised_config(read_config(directory, changes), directory)


def real_model(ranks: int = 1, context_ranks: int = 1, **changes: Any) -> DeepseekV3ForCausalLM:
    dcp = Communicator(0, context_ranks)
    build = BuildContext(torch.bfloat16, META, Communicator(0, ranks), 4096, dcp)
    return DeepseekV3ForCausalLM(real_config(**changes), build)


def logits(directory: Path, counts: list[int]) -> torch.Tensor:
    worker = TinyWorker(directory)
    core = worker.core()
    core.add(0, IDS)
    return forced_logits(worker.worker, core, 0, counts)


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_token_of_deepseek_v3_takes_576_numbers_a_layer(ranks: int) -> None:
    """On every rank: latents are replicated."""
    groups = real_model(ranks, n_routed_experts=16).kv_groups
    assert kv_specs(groups, 16, torch.bfloat16) == [FullAttentionSpec(16, 61 * 16 * 576 * 2)]
    scales = 4
    assert kv_specs(groups, 16, torch.float8_e4m3fn) == [FullAttentionSpec(16, 61 * 16 * (576 + scales))]
    (layer, *_) = allocate_kv(groups, [3], 16, torch.bfloat16, META)
    assert isinstance(layer, mla.LatentLayer)
    assert (layer.rows.shape, layer.latent_width) == ((3, 16, 576), 512)


def test_context_ranks_split_the_tokens_of_a_block() -> None:
    groups = real_model(8, 4, n_routed_experts=16).kv_groups
    assert kv_specs(groups, 16, torch.bfloat16) == [FullAttentionSpec(4 * 16, 61 * 16 * 576 * 2)]
    (layer, *_) = allocate_kv(groups, [3], 16, torch.bfloat16, META)
    assert isinstance(layer, mla.LatentLayer)
    assert (layer.rows.shape, layer.shard) == ((3, 16, 576), TokenShard(0, 4))


def test_sizes_and_scale_of_deepseek_v3() -> None:
    model = real_model(ranks=8, num_hidden_layers=4)
    attention = model.model.layers[0].self_attn
    assert attention.qkv_a_proj.weight.shape == (1536 + 512 + 64, 7168)
    assert attention.q_b_proj.weight.shape == (16 * 192, 1536)
    key_HNC, value_HVC = attention.kv_b_proj.by_head()
    assert (key_HNC.shape, value_HVC.shape) == ((16, 128, 512), (16, 128, 512))
    assert attention._args.scale == pytest.approx(192**-0.5 * 1.3688879454**2)
    assert model.model.layers[3].mlp.experts.gate_up.shape == (256 * 2 * 256, 7168)
    assert model.unused_on_disk[-1] == "model.layers.4.*"


def test_whole_prompts_are_expanded_and_chunks_absorbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tiny("deepseek-v3"), tmp_path)
    calls: Counter[str] = Counter()
    for name in ("prompt_attention", "latent_attention", "latent_queries", "write_latent"):

        def counted(*args: Any, name: str = name) -> Any:
            calls[name] += 1
            return REGISTRY[name](*args)

        monkeypatch.setattr(mla, name, counted)
    worker = TinyWorker(tmp_path)
    core = worker.core()
    core.add(0, IDS)
    calls.clear()
    forced_logits(worker.worker, core, 0, [16])
    assert calls == {"prompt_attention": 3, "latent_queries": 3}
    calls.clear()
    forced_logits(worker.worker, core, 0, [16, 8])
    assert calls == {"latent_attention": 6, "latent_queries": 6}


def test_separate_norms_give_the_same_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tiny("deepseek-v3"), tmp_path)
    together = logits(tmp_path, [16, 24])
    monkeypatch.setenv("ATOM_ENABLE_DS_QKNORM_FUSION", "0")
    torch.testing.assert_close(logits(tmp_path, [16, 24]), together, atol=1e-6, rtol=0)


def test_kimi_k2_equals_deepseek_v3(tmp_path: Path) -> None:
    save_tiny(tiny("deepseek-v3"), tmp_path)
    expected = logits(tmp_path, [40])
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"model_type": "kimi_k2"}
    path.write_text(json.dumps(config))
    assert torch.equal(logits(tmp_path, [40]), expected)


def test_mtp_layers_are_not_loaded(tmp_path: Path) -> None:
    save_tiny(tiny("deepseek-v3"), tmp_path)
    expected = logits(tmp_path, [40])
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load(file.read_bytes())
    more = {
        f"model.layers.3.{name}.weight": torch.ones(2) for name in ("eh_proj", "enorm", "shared_head.norm")
    }
    safetensors.torch.save_file(tensors | more, file)
    assert torch.equal(logits(tmp_path, [40]), expected)


@pytest.mark.parametrize(
    ("model", "change", "words"),
    [
        (DeepseekV3ForCausalLM, {"topk_method": "greedy"}, "topk_method greedy is not supported"),
        (DeepseekV3ForCausalLM, {"scoring_func": "softmax"}, "scoring_func softmax is not supported"),
        (DeepseekV3ForCausalLM, {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported; supported: 1"),
        (DeepseekV2ForCausalLM, {"norm_topk_prob": True}, "norm_topk_prob True is not supported"),
        (DeepseekV2ForCausalLM, {"mlp_bias": True}, "mlp_bias True is not supported"),
        (DeepseekV3ForCausalLM, {"q_lora_rank": None, "attention_bias": True}, "without q_lora_rank"),
    ],
)
def test_unsupported_configurations_are_refused(model: Any, change: dict[str, Any], words: str) -> None:
    plain = {"scoring_func": None, "topk_method": None, "norm_topk_prob": False, "num_hidden_layers": 1}
    config = {name: value for name, value in (real_config() | plain | change).items() if value is not None}
    if "q_lora_rank" in change:
        config["q_lora_rank"] = None
    with pytest.raises(ValueError, match=words):
        model(config, BuildContext(torch.bfloat16, META, Communicator(), 64))
