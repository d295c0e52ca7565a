"""Runs of vLLM's LLM class, one after the other in this process: settings from a file, token ids to another.

    python -m tests.vllm.generate RUNS.json RESULTS.jsonl

A run has a `name`, `environment` variables, the `prompts` as ids, `max_tokens`, the number of `rounds`, and
arguments for `llm`. A line of the results has the name, and `ids` (by round and prompt), `cached` (tokens of
each prompt of the last round that came from the prefix cache), `accepted` (draft tokens, in a list), `model`
(the modules of vLLM's model and of the one within), and `backends` (of attention), or `error`.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn, TextIO

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # of `_describe`, to the workers of several ranks


def main() -> None:
    import vllm.v1.worker.cpu_worker  # noqa: F401  once for all runs: it takes a minute

    runs = json.loads(Path(sys.argv[1]).read_text())
    with open(sys.argv[2], "a", buffering=1) as results:
        for run in runs:
            # A process for each: what vLLM leaves in its modules breaks the runs after speculation.
            if not (child := os.fork()):
                write_result(run, results)
            _, status = os.waitpid(child, 0)
            if status:
                results.write(
                    json.dumps({"name": run["name"], "error": f"ended with status {status}"}) + "\n"
                )


def write_result(run: dict[str, Any], results: TextIO) -> NoReturn:
    """Run in this process, and end it."""
    os.environ |= run["environment"]
    try:
        found = generate(run)
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
    results.write(json.dumps({"name": run["name"], **found}) + "\n")
    sys.stdout.flush()
    os._exit(0)


def generate(run: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    llm = LLM(**run["llm"], disable_log_stats=False)
    sampling = SamplingParams(max_tokens=run["max_tokens"], temperature=0, detokenize=False, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in run["prompts"]]
    ids = []
    outputs: list[Any] = []
    for _ in range(run["rounds"]):
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        ids.append([list(output.outputs[0].token_ids) for output in outputs])
    metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    described = llm.apply_model(_describe)
    llm.llm_engine.engine_core.shutdown()
    return {
        "ids": ids,
        "cached": [output.num_cached_tokens for output in outputs],
        "accepted": [metrics.get("vllm:spec_decode_num_accepted_tokens", 0)],
        "platform": type(current_platform).__name__,
        **described[0],
    }


def _describe(model: Any) -> dict[str, Any]:
    layers = model.modules() if hasattr(model, "modules") else ()
    backends = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
    held = getattr(model, "_atom", (model,))
    return {"model": f"{type(model).__module__}/{type(held[0]).__module__}", "backends": sorted(backends)}


if __name__ == "__main__":
    main()
