"""GGUF files as llama.cpp writes them of transformers' models: the same logits, settings and refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from atom.shared.config.model import ModelConfig
from tests.helpers.checkpoints.gguf_cases import (
    IDS,
    SIZES,
    YARN,
    YARN_ROPE,
    Case,
    Type,
    logits_of,
    prepared,
    saved,
    silent,
)
from tests.helpers.checkpoints.gguf_files import Sizes, hf_weights, write_gguf
from tests.helpers.checkpoints.gguf_layout import in_file
from tests.helpers.checkpoints.tiny_models import build_tiny, hf_logits
from tests.helpers.checkpoints.vision_models import build
from workers.checkpoint.prepare import prepare

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
EXPERTS = {"add_expert_count": 4, "add_expert_used_count": 2, "add_expert_feed_forward_length": 48}
THETA_5E5 = DEFAULT_ROPE | {"rope_theta": 5e5}
SHORT, LONG = [1.0] * 4, [1.0, 1.5, 2.5, 6.0]
CASES = [
    Case(
        "gemma2",
        "gemma2",
        {"sliding_window": 20, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0,
         "final_logit_softcapping": 1.0, "tie_word_embeddings": True},
        {"add_key_length": 16, "add_value_length": 16, "add_sliding_window": 20,
         "add_attn_logit_softcapping": 2.0, "add_final_logit_softcapping": 1.0},
    ),
    Case(
        "gemma3",
        "gemma3_text",
        {"sliding_window": 20, "query_pre_attn_scalar": 16, "tie_word_embeddings": True,
         "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
         "rope_parameters": {"sliding_attention": DEFAULT_ROPE,
                             "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}},
        {"add_key_length": 16, "add_value_length": 16, "add_sliding_window": 20, "add_rope_freq_base": 1e6,
         "add_rope_scaling_type": gguf.RopeScalingType.LINEAR, "add_rope_scaling_factor": 8.0,
         "add_sliding_window_pattern": [True, True, True, False]},
    ),
    Case(
        "phi3",
        "phi3",
        {"rope_parameters": DEFAULT_ROPE | {"partial_rotary_factor": 0.5, "rope_type": "longrope",
                                            "short_factor": SHORT, "long_factor": LONG, "factor": 8.0,
                                            "original_max_position_embeddings": 64},
         "original_max_position_embeddings": 64, "sliding_window": 30},
        {"add_rope_dimension_count": 8, "add_rope_scaling_orig_ctx_len": 64, "add_sliding_window": 30,
         "add_rope_scaling_attn_factors": (1 + np.log(8) / np.log(64)) ** 0.5},
        {"rope_factors_short.weight": SHORT, "rope_factors_long.weight": LONG},
    ),
    Case("phi3", "phi3", {"sliding_window": None}, {"add_rope_dimension_count": 16, "add_sliding_window": 0}),
    Case("olmo2", "olmo2", {"rope_parameters": THETA_5E5}, {"add_rope_freq_base": 5e5}),
    Case(
        "olmo2",
        "olmo3",
        {"sliding_window": 20,
         "rope_parameters": {"sliding_attention": DEFAULT_ROPE, "full_attention": YARN_ROPE}},
        {"add_sliding_window": 20, "add_sliding_window_pattern": [True, True, True, False], **YARN},
    ),
    Case(
        "granite",
        "granite",
        {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.3,
         "logits_scaling": 0.25, "attention_bias": True, "tie_word_embeddings": True},
        {"add_attention_scale": 0.3, "add_embedding_scale": 12.0, "add_residual_scale": 0.22,
         "add_logit_scale": 0.25, "add_rope_dimension_count": 16},
    ),
    Case("smollm3", "smollm3", {"tie_word_embeddings": True}, {"add_rope_dimension_count": 16}),
    Case("mistral3", "mistral", {"sliding_window": None}, {"add_rope_dimension_count": 16}),
    Case(
        "mistral3",
        "ministral3",
        {"sliding_window": None,
         "rope_parameters": YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}},
        {"add_rope_dimension_count": 16, "add_rope_scaling_yarn_log_mul": 1.0,
         "add_attn_temperature_scale": 0.3, **YARN},
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.architecture}-{case.model_type}")
def test_logits_are_those_of_transformers(tmp_path: Path, case: Case) -> None:
    model = saved(case, tmp_path / "m.gguf")
    found = logits_of(prepared(tmp_path / "m.gguf"))
    torch.testing.assert_close(found, hf_logits(model, IDS), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("kind", "more"), [("qwen3vl", {}), ("qwen3vlmoe", EXPERTS)])
def test_the_text_of_a_vision_model(tmp_path: Path, kind: str, more: dict[str, int]) -> None:
    """llama.cpp puts the vision model into another file."""
    whole = build({"qwen3vl": "qwen3_vl", "qwen3vlmoe": "qwen3_vl_moe"}[kind])
    text = {
        name.replace("language_model.", ""): tensor.numpy()
        for name, tensor in whole.state_dict().items()
        if ".visual." not in name
    }
    stated = {"add_key_length": 16, "add_value_length": 16, "add_layer_norm_rms_eps": 1e-6, **more}
    stated |= {"add_rope_dimension_sections": [3, 3, 2, 0], "add_num_deepstack_layers": 2}
    write_gguf(tmp_path / "m.gguf", in_file(text, kind, whole.config), kind, sizes=SIZES, **stated)
    found = logits_of(prepared(tmp_path / "m.gguf"))
    torch.testing.assert_close(found, hf_logits(whole, IDS), atol=1e-4, rtol=0)


@pytest.mark.parametrize("architecture", ["gemma3", "phi3", "granite"])
def test_quantized_matrices_keep_their_integers(tmp_path: Path, architecture: str) -> None:
    """In another order of rows, and where the file fuses them."""
    case = next(case for case in CASES if case.architecture == architecture)
    model = saved(case, tmp_path / "m.gguf", Type.Q8_0)
    directory = prepared(tmp_path / "m.gguf")
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                rounded = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), Type.Q8_0), Type.Q8_0)
                weight.copy_(torch.from_numpy(rounded))
    expected = hf_logits(model, IDS)
    assert (logits_of(directory) - expected).abs().max() < 2e-3 * expected.abs().max()


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("qwen2moe", {}, "has the architecture qwen2moe; supported: deepseek2, "),
        (
            "granite",
            {"add_attention_scale": 0.3, "add_rope_scaling_finetuned": False},
            "Granite without RoPE",
        ),
        ("olmo2", {"add_rope_scaling_type": gguf.RopeScalingType.LONGROPE}, "RoPE scaling longrope is not"),
        ("olmo2", YARN | {"add_rope_scaling_attn_factors": 1.5}, "YaRN with an attention factor of 1.5"),
        ("olmo2", YARN | {"add_rope_scaling_yarn_ext_factor": 1.0}, "rope.scaling.yarn_ext_factor is not"),
        ("smollm3", {"add_head_count_kv": [2]}, "cannot be expanded: .*num_key_value_heads"),
        ("granite", {}, r"lacks granite\.attention\.scale"),
    ],
)
def test_what_is_not_supported_is_refused(
    tmp_path: Path, kind: str, change: dict[str, Any], words: str
) -> None:
    write_gguf(tmp_path / "m.gguf", hf_weights(), kind, **change)
    with pytest.raises(ValueError, match=words):
        prepared(tmp_path / "m.gguf")


def test_gemma_has_no_space_before_a_text(tmp_path: Path) -> None:
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [3, 3, 3, 2, *[6] * 256]
    words = ["\u2581", "h", "i", "hi", "\u2581hi"]
    spm = {
        "add_tokenizer_model": "llama",
        "add_tokenizer_pre": "default",
        "add_token_list": pieces + words,
        "add_token_scores": [0.0] * len(pieces) + [-5.0, -4.0, -3.0, -1.0, -2.0],
        "add_token_types": kinds + [1] * len(words),
        "add_token_merges": ["h i", "\u2581 hi"],
        "add_bos_token_id": 2,
        "add_eos_token_id": 1,
        "add_add_space_prefix": False,
    }
    case = CASES[0]
    built = build_tiny(replace(case.row, config=case.row.config | {"vocab_size": len(pieces + words)}))
    state = {name: tensor.numpy() for name, tensor in built.state_dict().items() if name != "lm_head.weight"}
    write_gguf(tmp_path / "m.gguf", state, "gemma2", sizes=SIZES, **case.stated, **spm)
    file = prepare(ModelConfig(model=str(tmp_path / "m.gguf")), tmp_path / "cache", silent).tokenizer_file
    assert file is not None
    assert Tokenizer.from_file(file).encode("hi hi").tokens == ["<bos>", "hi", "\u2581hi"]
    write_gguf(
        tmp_path / "m.gguf",
        state,
        "gemma2",
        sizes=SIZES,
        **case.stated,
        **spm | {"add_add_space_prefix": True},
    )
    with pytest.raises(ValueError, match="add_space_prefix = true is not supported"):
        prepared(tmp_path / "m.gguf")


def test_the_largest_gemmas_have_another_softmax_scale(tmp_path: Path) -> None:
    from workers.weights.gguf_families import GGUF_FAMILIES, Metadata

    for kind, layers in (("gemma2", 46), ("gemma3", 62)):
        path = tmp_path / f"{kind}.gguf"
        write_gguf(path, hf_weights(), kind, sizes=Sizes(hidden=80, layers=layers), add_key_length=16)
        config = GGUF_FAMILIES[kind].config(Metadata(gguf.GGUFReader(path), kind))
        assert config["query_pre_attn_scalar"] == 80 // 4
