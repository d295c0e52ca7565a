"""Attention of prompts with images whose tokens see each other compiles for the GPUs that run it."""

from atom_ops import triton_impl
from atom_ops.ops.attention.attention import AttentionRule
from atom_ops.ops.attention.attention_plan import AttentionPlan
from atom_ops.ops.attention.kv_cache import FP8, make_kv_layer
from tests.compile.test_chips import BF16, META, check, chips, ints, pytestmark, run, tensor
from tests.helpers.kernels.chips import CHIPS, compiling_for

__all__ = ["pytestmark"]


@chips
def test_images_whose_tokens_see_each_other(chip: str) -> None:
    """With the heads of Gemma 3: 4B, 27B."""
    triton_impl.load()
    with compiling_for(CHIPS[chip]) as compiled:
        for heads, kv_heads, width in ((8, 4, 256), (32, 16, 128)):
            for dtype, window in ((BF16, 0), (BF16, 1024), (FP8, 1024)):
                cache = make_kv_layer(64, 16, kv_heads, width, dtype, META)
                plan = AttentionPlan(ints(4, 64), ints(4), ints(5), 2048, 1, 512, 1024, ahead_T=ints(2048))
                q_THE = tensor(2048, heads, width)
                run("paged_attention", q_THE, cache, plan, AttentionRule(0.1, window))
    check(compiled, chip)
