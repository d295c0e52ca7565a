"""MiniMax-M2 as published: its own names of settings, and what is refused of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.checkpoints.tiny_models import hf_logits, prompt_of, save_tiny, tiny
from tests.helpers.engine.teacher_forcing import TinyWorker, forced_logits

IDS = prompt_of(40, seed=3)


def change(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_rotary_dimension_by_its_older_name(tmp_path: Path) -> None:
    reference, _ = save_tiny(tiny("minimax-m2"), tmp_path)
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    change(tmp_path, rope_parameters=plain, rotary_dim=8, attn_type_list=[1, 1, 1], scoring_func="sigmoid")
    ours = TinyWorker(tmp_path)
    core = ours.core()
    core.add(0, IDS)
    found = forced_logits(ours.worker, core, 0, [25, 15])
    torch.testing.assert_close(found, hf_logits(reference, IDS), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_type_list": [0, 1, 1]}, r"attn_type_list \[0, 1, 1\] is not supported"),
        ({"qk_norm_type": "per_head"}, "qk_norm_type per_head is not supported"),
        ({"shared_intermediate_size": 8}, "shared_intermediate_size 8 is not supported"),
    ],
)
def test_unsupported_settings_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_tiny(tiny("minimax-m2"), tmp_path)
    change(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        TinyWorker(tmp_path)
