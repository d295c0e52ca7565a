"""Which vision_config of Kimi-K2.5 is read, and how."""

from typing import Any

import pytest

from workers.vision.moonvit import moonvit_config


def test_names_of_transformers_and_published_ones() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 2, "num_hidden_layers": 3}
    published = {f"vt_{name}": value for name, value in sizes.items()}
    places = {"pos_emb_height": 6, "pos_emb_width": 8}
    published |= {f"init_{name}": value for name, value in places.items()}
    more = {"merge_type": "sd2_tpool", "mm_projector_type": "patchmerger", "merge_kernel_size": [2, 2]}
    found = moonvit_config(sizes | places | {"merge_kernel_size": 2})
    assert found == moonvit_config(published | more)
    assert found == sizes | places | {
        "merge_kernel_size": 2,
        "patch_size": 14,
        "hidden_act": "gelu_pytorch_tanh",
    }


@pytest.mark.parametrize(
    "change",
    [{"mm_projector_type": "patchmergerv2"}, {"norm_type": "rmsnorm"}, {"merge_kernel_size": [2, 4]}],
)
def test_other_towers_are_refused(change: dict[str, Any]) -> None:
    (name,) = change
    with pytest.raises(ValueError, match=f"vision_config with {name} .* is not supported; to run the text"):
        moonvit_config(change)
