"""A model for images in vLLM, asked for texts alone: it is vLLM's own, and so is its text model.

vLLM makes the text model by the name of an architecture that ATOM has registered.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.helpers.checkpoints.multimodal import save_multimodal
from tests.helpers.checkpoints.reference import NEW_TOKENS, PROMPTS
from tests.helpers.checkpoints.tiny_models import MAX_MODEL_LEN, hf_greedy
from tests.helpers.checkpoints.vision_models import GEMMA3, PROCESSORS
from tests.helpers.plugins.host_runs import STAND_INS, Found, run_process, wrong_ids
from tests.vllm.cases import HOST, OWN, wide


def check_larger_model(python: str, environment: Mapping[str, str], place: Path) -> Found:
    """The problems with each attention; `place` is a directory on vLLM's path. Raises TimeoutExpired."""
    directory = place / "model"
    text = save_multimodal(wide("gemma3", 3), "gemma3", GEMMA3[1], directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSORS["gemma3"]))
    expected = [hf_greedy(text, prompt, NEW_TOKENS).ids for prompt in PROMPTS]
    runs = {attention: _run(attention, directory) for attention in (OWN, HOST)}
    (place / "runs.json").write_text(json.dumps([*runs.values()]))
    results = place / "results.jsonl"
    # vLLM's processors of images import torchvision.
    variables = {**environment, "PYTHONPATH": os.pathsep.join([environment["PYTHONPATH"], str(STAND_INS)])}
    command = [python, "-m", "tests.vllm.generate", str(place / "runs.json"), str(results)]
    found = {line["name"]: line for line in run_process(command, variables, results)}
    names = [str(run["name"]) for run in runs.values()]
    return {name: _problems(expected, found.get(name, {"error": "no result"})) for name in names}


def _run(attention: str, directory: Path) -> dict[str, Any]:
    return {
        "name": f"text model of a larger one, {attention} attention",
        "environment": {"ATOM_DISABLE_VLLM_PLUGIN_ATTENTION": "0" if attention == OWN else "1"},
        "prompts": PROMPTS,
        "max_tokens": NEW_TOKENS,
        "rounds": 1,
        "llm": {
            "model": str(directory),
            "max_model_len": MAX_MODEL_LEN,
            "enforce_eager": True,
            "max_num_seqs": 4,
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "limit_mm_per_prompt": {"image": 0},
        },
    }


def _problems(expected: list[list[int]], found: Mapping[str, Any]) -> list[str]:
    if "error" in found:
        return [str(found["error"])]
    wrong = wrong_ids(expected, found["ids"])
    return wrong if found["backends"] == ["CPU_ATTN"] else [*wrong, f"attention by {found['backends']}"]
