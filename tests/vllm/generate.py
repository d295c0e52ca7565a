"""Runs of vLLM's LLM class, one after the other in this process: settings from a file, token ids to another.

    python -m tests.vllm.generate RUNS.json RESULTS.jsonl

A run has a `name`, `environment` variables, the `prompts` as ids, `max_tokens`, arguments for `llm`, and perhaps
the number of `rounds`. A line of the results has the name, and `ids` (by round and prompt), `cached` (prompt
tokens of the last round that came from the prefix cache), `accepted` (draft tokens), `model` (the class), `backends`
(of attention) and `ops` (those of ATOM that ran), or `error`.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def main() -> None:
    runs = json.loads(Path(sys.argv[1]).read_text())
    with open(sys.argv[2], "a", buffering=1) as results:
        for run in runs:
            os.environ |= run.get("environment", {})
            try:
                found = generate(run)
            except Exception as error:
                traceback.print_exc()
                found = {"error": f"{type(error).__name__}: {error}"}
            for name in run.get("environment", {}):
                del os.environ[name]
            results.write(json.dumps({"name": run["name"], **found}) + "\n")


def generate(run: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    llm = LLM(**run["llm"], disable_log_stats=False)
    try:
        sampling = SamplingParams(
            max_tokens=run["max_tokens"], temperature=0, detokenize=False, ignore_eos=True
        )
        ids = []
        outputs: list[Any] = []
        for _ in range(run.get("rounds", 1)):
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in run["prompts"]], sampling, use_tqdm=False)
            ids.append([list(output.outputs[0].token_ids) for output in outputs])
        metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
        (model,) = llm.apply_model(_describe)
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
    return {
        "ids": ids,
        "cached": [output.num_cached_tokens for output in outputs],
        "accepted": metrics.get("vllm:spec_decode_num_accepted_tokens"),
        "platform": type(current_platform).__name__,
        **model,
    }


def _describe(model: Any) -> dict[str, Any]:
    layers = model.modules() if hasattr(model, "modules") else ()
    backends = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
    held = getattr(model, "_atom", (model,))
    return {"model": f"{type(model).__module__}/{type(held[0]).__module__}", "backends": sorted(backends)}


if __name__ == "__main__":
    main()
