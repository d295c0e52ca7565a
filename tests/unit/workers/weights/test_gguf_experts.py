"""GGUF files of models with experts and with recurrent layers: transformers' logits."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch

from tests.helpers.checkpoints.gguf_cases import (
    IDS,
    YARN,
    YARN_ROPE,
    Case,
    Type,
    logits_of,
    prepared,
    saved,
    silent,
)
from tests.helpers.checkpoints.tiny_models import hf_logits
from workers.weights.gguf import convert

Gating = gguf.ExpertGatingFuncType
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
COUNTS = {"add_expert_count": 6, "add_expert_used_count": 3}
ROUTED = {
    "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
}  # fmt: skip
STATED_ROUTED = COUNTS | {
    "add_expert_feed_forward_length": 32, "add_expert_shared_count": 2, "add_leading_dense_block_count": 1,
    "add_expert_weights_scale": 2.5, "add_expert_weights_norm": True,
    "add_expert_gating_func": Gating.SIGMOID,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 4,
}  # fmt: skip
STATED_LATENT = {
    "add_q_lora_rank": 32, "add_kv_lora_rank": 32, "add_key_length": 40, "add_value_length": 32,
    "add_key_length_mla": 32, "add_value_length_mla": 16, "add_head_count_kv": 1,
    "add_rope_dimension_count": 8,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16,
    "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "rope_parameters": PARTIAL,
}  # fmt: skip
STATED_DELTA = {
    "add_ssm_group_count": 2, "add_ssm_time_step_rank": 6, "add_ssm_state_size": 16,
    "add_ssm_inner_size": 192, "add_ssm_conv_kernel": 4, "add_full_attention_interval": 4,
    "add_rope_dimension_count": 8,
}  # fmt: skip
SHARED = {
    "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64, "norm_topk_prob": True,
}  # fmt: skip
STATED_SHARED = COUNTS | {
    "add_expert_feed_forward_length": 32, "add_expert_shared_feed_forward_length": 64,
}  # fmt: skip


MIXTRAL = Case(
    "llama",
    "mixtral",
    {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": None},
    COUNTS | {"add_rope_dimension_count": 16},
)
QWEN3_MOE = Case(
    "qwen3moe",
    "qwen3_moe",
    {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "num_hidden_layers": 3,
    },
    COUNTS | {"add_expert_feed_forward_length": 32, "add_key_length": 16, "add_value_length": 16},
)
GPT_OSS = Case(
    "gpt-oss",
    "gpt_oss",
    {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 20,
     "rope_parameters": YARN_ROPE | {"truncate": False}},
    COUNTS | YARN | {"add_expert_feed_forward_length": 96, "add_sliding_window": 20},
)  # fmt: skip
QWEN35_MOE = Case(
    "qwen35moe",
    "qwen3_5_moe_text",
    DELTA | {key: SHARED[key] for key in SHARED if key != "norm_topk_prob"},
    STATED_DELTA | STATED_SHARED | {"add_key_length": 16},
)
INDEXED = {"head_dim": 8, "index_topk": 16, "index_n_heads": 24, "index_head_dim": 20}
STATED_INDEXED = {"add_indexer_head_count": 24, "add_indexer_key_length": 20, "add_indexer_top_k": 16}
GLM_DSA = Case(
    "glm-dsa",
    "glm_moe_dsa",
    ROUTED | LATENT | INDEXED | {"n_group": 1, "topk_group": 1, "index_topk_freq": 2},
    STATED_ROUTED | STATED_LATENT | STATED_INDEXED,
)
LLAMA4 = Case(
    "llama4",
    "llama4_text",
    {"num_local_experts": 6, "num_experts_per_tok": 1, "intermediate_size": 32, "intermediate_size_mlp": 96,
     "interleave_moe_layer_step": 2,
     "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 16.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 1.0, "original_max_position_embeddings": 8192}},
    {"add_expert_count": 6, "add_expert_used_count": 1, "add_expert_feed_forward_length": 32,
     "add_interleave_moe_layer_step": 2, "add_rope_dimension_count": 16, "add_rope_freq_base": 5e5},
    {"rope_freqs.weight": [1.0 if 2 * math.pi * 5e5 ** (i / 8) < 8192 else 16.0 for i in range(8)]},
)  # fmt: skip
KINDS = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
CASES = [
    MIXTRAL,
    QWEN3_MOE,
    GPT_OSS,
    Case(
        "glm4moe",
        "glm4_moe",
        ROUTED | {"n_group": 1, "topk_group": 1, "use_qk_norm": True, "rope_parameters": PARTIAL},
        STATED_ROUTED | {"add_key_length": 16, "add_rope_dimension_count": 8},
    ),
    Case(
        "minimax-m2",
        "minimax_m2",
        {"num_local_experts": 6, "num_experts_per_tok": 3, "rope_parameters": PARTIAL},
        COUNTS | {"add_expert_feed_forward_length": 96, "add_key_length": 16, "add_rope_dimension_count": 8},
    ),
    Case(
        "deepseek2",
        "deepseek_v3",
        ROUTED | LATENT | {"head_dim": 8, "n_group": 2, "topk_group": 1,
         "rope_parameters": YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        STATED_ROUTED | STATED_LATENT | YARN
        | {"add_rope_scaling_yarn_log_mul": 0.1, "add_expert_group_count": 2,
           "add_expert_group_used_count": 1},
    ),
    Case(
        "deepseek2",
        "deepseek_v2",
        ROUTED | LATENT | {"head_dim": 8, "q_lora_rank": None, "norm_topk_prob": False,
         "topk_method": "greedy", "routed_scaling_factor": 1.0},
        {key: STATED_LATENT[key] for key in STATED_LATENT if key != "add_q_lora_rank"}
        | STATED_ROUTED
        | {"add_expert_weights_norm": False, "add_expert_gating_func": Gating.SOFTMAX,
           "add_expert_weights_scale": 1.0},
    ),
    Case(
        "deepseek2",
        "glm4_moe_lite",
        ROUTED | LATENT | {"head_dim": 8, "n_group": 1, "topk_group": 1},
        STATED_ROUTED | STATED_LATENT | {"add_tokenizer_pre": "glm4"},
    ),
    Case(
        "qwen3next",
        "qwen3_next",
        DELTA | SHARED,
        STATED_DELTA | STATED_SHARED | {"add_key_length": 16},
    ),
    Case("qwen35", "qwen3_5_text", DELTA, STATED_DELTA | {"add_key_length": 16}),
    QWEN35_MOE,
    Case(
        "deepseek32",
        "deepseek_v32",
        ROUTED | LATENT | INDEXED | {"n_group": 2, "topk_group": 1},
        STATED_ROUTED | STATED_LATENT | STATED_INDEXED
        | {"add_expert_group_count": 2, "add_expert_group_used_count": 1},
    ),
    GLM_DSA,
    LLAMA4,
    Case(
        "kimi-linear",
        "kimi_linear",
        {name: value for name, value in (ROUTED | LATENT).items() if name != "n_routed_experts"}
        | {"q_lora_rank": None, "num_local_experts": 6, "layer_types": KINDS, "linear_num_heads": 4,
           "linear_head_dim": 24, "linear_conv_kernel_dim": 4},
        {name: value for name, value in (STATED_ROUTED | STATED_LATENT).items() if name != "add_q_lora_rank"}
        | {"add_head_count_kv": [0, 1, 0, 0], "add_kda_head_dim": 24, "add_ssm_conv_kernel": 4},
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.architecture}-{case.model_type}")
def test_logits_are_those_of_transformers(tmp_path: Path, case: Case) -> None:
    model = saved(case, tmp_path / "m.gguf")
    found = logits_of(prepared(tmp_path / "m.gguf"))
    torch.testing.assert_close(found, hf_logits(model, IDS), atol=1e-4, rtol=0)


def by_layer(layers: int, **kinds: Type) -> dict[str, Type]:
    """Types of the tensors of all layers."""
    return {f"blk.{n}.{name}.weight": kind for n in range(layers) for name, kind in kinds.items()}


def wide(case: Case) -> Case:
    """With blocks of 256 inputs."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256}
    stated = {"add_embedding_length": 256, "add_expert_feed_forward_length": 256}
    return replace(case, config=case.config | sizes, stated=case.stated | stated)


@pytest.mark.parametrize(
    ("case", "types", "formats"),
    [
        (QWEN3_MOE, Type.Q8_0, {"int8_32"}),
        (QWEN35_MOE, by_layer(4, attn_qkv=Type.Q4_1, attn_gate=Type.Q4_1, ssm_out=Type.Q4_1),
         {"int4_32_offsets"}),
        (GPT_OSS, by_layer(4, ffn_gate_exps=Type.MXFP4, ffn_up_exps=Type.MXFP4, ffn_down_exps=Type.MXFP4),
         {"mxfp4"}),
        (QWEN3_MOE, by_layer(4, ffn_gate_exps=Type.MXFP4, ffn_up_exps=Type.MXFP4, ffn_down_exps=Type.MXFP4),
         {"mxfp4"}),
        # As llama.cpp mixes them: better ones for some of the down projections.
        (wide(QWEN3_MOE),
         by_layer(4, ffn_gate_exps=Type.Q4_K, ffn_up_exps=Type.Q4_K, ffn_down_exps=Type.Q4_K)
         | {"blk.1.ffn_down_exps.weight": Type.Q6_K},
         {"int4_32_offsets_units", "int6_16_units"}),
        # A type that is not kept, for one of two matrices that the engine fuses.
        (GPT_OSS, by_layer(4, ffn_gate_exps=Type.MXFP4, ffn_down_exps=Type.MXFP4), set()),
        (QWEN3_MOE, by_layer(4, ffn_gate_exps=Type.Q8_0, ffn_down_exps=Type.Q5_0), {"int6_32"}),
        (LLAMA4, Type.Q8_0, {"int8_32"}),
        (LLAMA4, by_layer(4, ffn_gate_exps=Type.MXFP4, ffn_up_exps=Type.MXFP4, ffn_down_exps=Type.MXFP4),
         set()),
        (GLM_DSA,
         {f"model.layers.{layer}.self_attn.{name}.weight": Type.Q8_0
          for layer in range(4)
          for name in ("q_a_proj", "indexer.wk", "indexer.wq_b", "indexer.weights_proj")},
         {"int8_32"}),
    ],
    ids=["q8_0", "tiled-q4_1", "gpt-oss-mxfp4", "mxfp4", "q4_k_m", "gpt-oss-mixed", "gate-alone",
         "inputs-first", "inputs-first-mxfp4", "indexer"],
)  # fmt: skip
def test_experts_keep_their_integers(
    tmp_path: Path, case: Case, types: Type | Mapping[str, Type], formats: set[str]
) -> None:
    saved(case, tmp_path / "m.gguf", types)
    kept = prepared(tmp_path / "m.gguf")
    stated = json.loads((kept / "config.json").read_text()).get("quantization_config", {"modules": {}})
    assert stated["modules"].keys() == formats
    (tmp_path / "expanded").mkdir()
    convert(tmp_path / "m.gguf", tmp_path / "expanded", silent, keep_integers=False)
    expected = logits_of(tmp_path / "expanded")
    assert (logits_of(kept) - expected).abs().max() < 2e-3 * expected.abs().max()
