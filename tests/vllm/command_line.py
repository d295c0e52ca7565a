"""The command line with which ATOM's plugin is published, in vLLM's build for CPUs: served or refused.

As published but for the model, its port, two ranks instead of eight, and float32, in which ids are compared.
What is refused by name is left out, one flag after the other, so that all others are seen to work.
"""

import json
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.helpers.checkpoints import tiny_tokenizer
from tests.helpers.checkpoints.reference import NEW_TOKENS, PROMPTS
from tests.helpers.plugins.host_runs import Found, save_and_generate, wrong_ids
from tests.vllm.cases import wide
from tests.vllm.evaluation import write_name
from tests.vllm.serving import serving

FLAGS = {
    "--tensor-parallel-size": "2",
    "--enable-expert-parallel": "",
    "--trust-remote-code": "",
    "--disable-log-requests": "",
    "--gpu_memory_utilization": "0.9",
    "--async-scheduling": "",
    "--load-format": "fastsafetensors",
    "--compilation-config": '{"cudagraph_mode": "FULL_AND_PIECEWISE"}',
    "--kv-cache-dtype": "fp8",
    "--max-num-batched-tokens": "18432",
    "--max-model-len": "16384",
    "--no-enable-prefix-caching": "",
}
"""Flag -> its value, or empty."""
_ANSWER_S = 600.0
_GONE, _KV, _LOAD = "--disable-log-requests", "--kv-cache-dtype", "--load-format"
_HOST_ATTENTION = {"ATOM_DISABLE_VLLM_PLUGIN_ATTENTION": "1"}
_POSITIONS = 16384


@dataclass(frozen=True)
class Line:
    """The command line without some of its flags, and what becomes of it."""

    without: tuple[str, ...]
    words: str
    """What the log has to say."""
    served: bool = False
    """Whether it gets ready; else it ends."""
    environment: Mapping[str, str] = field(default_factory=dict)
    equal: bool = True
    """Whether the ids are transformers': not with a rounded cache."""

    @property
    def name(self) -> str:
        left_out = f" without {' '.join(self.without)}" if self.without else ""
        attention = " on vLLM's attention" if self.environment else ""
        return f"the published command line{left_out}{attention}: {'served' if self.served else 'refused'}"


LINES = [
    # vLLM has no such flag any more.
    Line((), f"unrecognized arguments: {_GONE}"),
    Line((_GONE,), f"{_KV} fp8: ATOM's attention in vLLM keeps the compute dtype: omit it, or set"),
    # vLLM reads with that package on GPUs alone.
    Line((_GONE,), "No module named 'fastsafetensors'", environment=_HOST_ATTENTION),
    Line((_GONE, _KV, _LOAD), "with ATOM's attention", served=True),
    Line((_GONE, _LOAD), "with vLLM's attention", served=True, environment=_HOST_ATTENTION, equal=False),
]


def check_command_line(python: str, environment: Mapping[str, str], place: Path) -> Found:
    """The problems of each line; `place` is a directory on vLLM's path."""
    write_name(python, place)
    model = place / "model"
    model.mkdir()
    vocabulary = tiny_tokenizer.checkpoint(model).vocab_size
    row = wide("qwen3-moe", 1)
    sizes = {"vocab_size": vocabulary, "max_position_embeddings": _POSITIONS}
    expected = save_and_generate(replace(row, config=row.config | sizes), None, model)
    return {
        line.name: _problems(python, model, line, {**environment, **line.environment}, expected, place)
        for line in LINES
    }


def _problems(
    python: str,
    model: Path,
    line: Line,
    environment: Mapping[str, str],
    expected: list[list[int]],
    place: Path,
) -> list[str]:
    log = place / "serve.log"
    given = [part for flag, value in FLAGS.items() if flag not in line.without for part in (flag, value)]
    flags = ["--dtype", "float32", *(part for part in given if part)]
    wrong = []
    try:
        with serving(python, str(model), flags, environment, log) as url:
            found = _ids(url, str(model))
        if not line.served:
            wrong.append("it was served")
        elif line.equal:
            wrong += wrong_ids(expected, [found])
        elif any(len(ids) != NEW_TOKENS for ids in found):
            wrong.append(f"ids: {found}")
    except TimeoutError as error:
        wrong += [str(error)] if line.served else []
    return wrong if line.words in log.read_text() else [*wrong, f"the log does not say {line.words!r}"]


def _ids(url: str, model: str) -> list[list[int]]:
    """Greedy ids after each prompt."""
    body = {"model": model, "prompt": PROMPTS, "max_tokens": NEW_TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    choices = json.load(urllib.request.urlopen(request, timeout=_ANSWER_S))["choices"]
    return [choice["token_ids"] for choice in sorted(choices, key=lambda choice: choice["index"])]
