"""Models on several ranks whose ops and collectives are AITER's and MORI's, emulated: the ids of one rank."""

from dataclasses import replace

import msgspec
import pytest
import torch

from atom.shared.config.checkpoint import Checkpoint
from parallel.mesh import Mesh
from tests.helpers.checkpoints.reference import PROMPTS
from tests.helpers.checkpoints.tiny_models import Tiny, engine_config, save_tiny, tiny
from tests.helpers.parallel.layout_rank import Job, Outcome, run
from tests.helpers.parallel.layouts import Layout
from tests.helpers.parallel.ranks import Ranks

DEADLINE_S = 240
SCRIPT = """
    from pathlib import Path
    from tests.helpers.parallel.emulated_rank import run_all
    run_all(Path("{jobs}"), rank, mesh.meeting)
    mesh.close()
"""
TP = Layout("TP 2", 2)
TP_EP = Layout("TP 2 + EP", 2, expert_parallel=True)
DP_EP = Layout("DP 2 + EP", expert_parallel=True, dp=2, all2all="mori")

# Sizes that AITER's kernels take.
_SIZES = {"hidden_size": 64, "intermediate_size": 128}
_MOE_SIZES = {"moe_intermediate_size": 32, "mlp_only_layers": [0]}
_LATENT_SIZES = {
    **_SIZES, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "moe_intermediate_size": 32,
}  # fmt: skip
MODELS = {
    "llama": Tiny("llama", "llama", 2, _SIZES),
    "qwen3-moe": replace(tiny("qwen3-moe"), seed=2, config=tiny("qwen3-moe").config | _SIZES | _MOE_SIZES),
    "qwen3": Tiny("qwen3", "qwen3", 2, _SIZES),
    "deepseek-v3": replace(tiny("deepseek-v3"), config=tiny("deepseek-v3").config | _LATENT_SIZES),
    "glm-5": replace(tiny("glm-5"), config=tiny("glm-5").config | _LATENT_SIZES | {"index_head_dim": 72}),
    "gpt-oss": tiny("gpt-oss"),
}
WITH_EXPERTS = ("qwen3-moe", "deepseek-v3", "glm-5", "gpt-oss")
CASES = [
    *((name, TP) for name in ("llama", "qwen3")),
    *((name, layout) for name in WITH_EXPERTS for layout in (TP_EP, DP_EP)),
]
_DENSE = {"aiter.rmsnorm2d_fwd_with_add", "aiter.tuned_gemm.tgemm.mm"}
AITERS = {
    "llama": {"aiter.flash_attn_varlen_func", *_DENSE},
    "qwen3": {"aiter.flash_attn_varlen_func", *_DENSE},
    "gpt-oss": {"aiter.ops.triton.unified_attention.unified_attention", *_DENSE},
    "glm-5": {"aiter.fused_moe.fused_moe", "aiter.mla.mla_decode_fwd"},
    "qwen3-moe": {"aiter.fused_moe.fused_moe", "aiter.rmsnorm2d_fwd_with_add"},
    "deepseek-v3": {"aiter.fused_moe.fused_moe", "aiter.mla.mla_decode_fwd"},
}
"""What each model runs, among others."""
MORIS = {f"mori.ops.EpDispatchCombineOp.{each}" for each in ("dispatch", "combine")}

pytestmark = pytest.mark.models


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    directory = tmp_path_factory.mktemp("models")
    return {name: save_tiny(each, directory / name)[1] for name, each in MODELS.items()}


@pytest.fixture(scope="module")
def found(
    checkpoints: dict[str, Checkpoint], tmp_path_factory: pytest.TempPathFactory
) -> list[list[tuple[Outcome, dict[str, int]]]]:
    """What each rank found in each case, and its calls of the libraries."""
    path, base = tmp_path_factory.mktemp("jobs") / "jobs.json", engine_config()
    jobs = [Job(layout.config(base), checkpoints[name], layout, PROMPTS) for name, layout in CASES]
    path.write_bytes(msgspec.json.encode(jobs))
    ranks = Ranks()
    try:
        ranks.start(SCRIPT.format(jobs=path), tp=2, timeout=DEADLINE_S)
        outputs = ranks.outputs(DEADLINE_S)
    finally:
        ranks.kill()
    by_rank = []
    for output in outputs:
        outcomes, calls = output.splitlines()
        parts = msgspec.json.decode(outcomes, type=list[Outcome]), msgspec.json.decode(calls)
        by_rank.append(list(zip(*parts, strict=True)))
    return [list(each) for each in zip(*by_rank, strict=True)]


@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{name}-{layout.name}" for name, layout in CASES])
def test_ranks_sample_the_tokens_of_one(
    number: int,
    found: list[list[tuple[Outcome, dict[str, int]]]],
    checkpoints: dict[str, Checkpoint],
) -> None:
    """One rank computes with torch."""
    name, layout = CASES[number]
    alone = run(Job(engine_config(), checkpoints[name], Layout("1 rank"), PROMPTS), Mesh(torch.device("cpu")))
    assert len({token for ids in alone.ids for token in ids}) >= 12
    for rank, (outcome, calls) in enumerate(found[number]):
        assert outcome.ids == alone.ids[rank // layout.tp :: layout.dp]
        assert set(calls) >= AITERS[name] | (MORIS if layout.dp > 1 else {"aiter.all_reduce"})
