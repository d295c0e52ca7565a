"""Writes docs/use/models.md from the recorded results of tests/models.

python -m tools.models_table
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.helpers.checkpoints.checkpoint_contents import contents_table
from tests.helpers.parallel.layouts import layouts_of

_ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = _ROOT / "docs/use/models.md"
PROVEN = _ROOT / "tests" / "models" / "proven.json"

PROOFS = {
    "mixed": "mixed lengths",
    "chunked": "chunks of 16",
    "prefix": "prefix cache",
    "preempted": "preempted",
    "logits": "logits",
    "tensors": "tensors",
}
"""Kinds of test, and their column headings."""

_HEAD = """\
# Models

`model_type` and the architecture in a checkpoint's config.json decide whether it runs; anything else is
refused at start, with the list of supported architectures. `make models` writes this page from the
results of `tests/models`.

## Files

- A directory with `config.json` and safetensors, as one file or as shards with an index; from the Hugging
  Face hub, or local.
- For Llama, Mistral, Ministral 3, Qwen2, Qwen3, Gemma 2 and 3, Phi-3 and Phi-4, OLMo 2 and 3, Granite and
  SmolLM3, a GGUF file; of models with experts, for Mixtral, Qwen3-MoE, Qwen3-Next, Qwen3.5 (also the dense
  one), GPT-OSS, GLM-4.5 to 5, GLM-4.7-Flash, DeepSeek V2 to V3.2 and Kimi-K2, Kimi-Linear, MiniMax-M2 and
  Llama 4; and for the text of Qwen3-VL. Of a model in parts (`NAME-00001-of-00003.gguf`), which have to be in
  one directory, name the first part or the directory; on the hub all of them are fetched.
  `owner/name:Q4_K_M` is the GGUF model of that quantization. It is converted once, into `ATOM_CACHE_DIR`; on
  a CPU its integers are [kept](quantization.md#gguf). A layer for multi-token prediction in the file is for
  [`--method mtp`](speculation.md). Vision models, which llama.cpp puts into another file, are not read.
  Other architectures are refused by name, among them those with Mamba layers, and Granite without RoPE.
- A missing, unused or misshaped tensor is an error that names it. Biases of zeros, RoPE tables and MTP layers
  are not needed, and are not read.
- Qwen3-VL, Qwen3.5, Gemma 3 and Kimi-K2.5 read [images](images.md). Of another multimodal directory (Llama 4,
  Mistral Small 3 and 4, Ministral 3) the language model runs, whose settings are in `text_config`; requests
  with images are refused.
- `generation_config.json` gives the end-of-sequence ids and the default sampling parameters.
- RoPE types: default, linear, dynamic, llama3, yarn and longrope. Dynamic and longrope choose their
  frequencies once, for `--max-model-len`, because cached keys are not recomputed; transformers chooses
  them for each text. They agree if `--max-model-len` is not above the length before scaling.
- Llama 4's chunked layers cache the last `attention_chunk_size` tokens, as a sliding window of that length
  would: blocks before them are freed, and a prefix is found in the cache if they are there. Tokens of the
  chunk before are hidden by the kernels.

"""
_TESTED = """\
## What is tested

Each configuration is a tiny random model that transformers saves and the engine serves, with all its
processes, in float32 on a CPU. The expected tokens come from transformers without a cache. A configuration
counts only if each output has at least 16 distinct tokens of 32 and a top-2 margin of at least 0.001
everywhere.

| test | what equals transformers' |
|---|---|
| mixed lengths | 32 greedy tokens each of prompts of 5, 37 and 64 tokens that run together |
| chunks of 16 | the same with 16 tokens per step, in blocks of 4 |
| prefix cache | the same with an empty cache, and with the prompt cached |
| preempted | the same with a KV cache for the longest request only: others are preempted and resumed |
| logits | log probabilities at every position, also of the top 20, within 0.0001 |
| tensors | the logits after a change of one tensor of each kind in the checkpoint, which changes them |
| layouts | 8 greedy tokens of the same prompts, in chunks of 16 together with decodes, on several ranks |

The first configuration of each family also runs with room for all prompts at once, and with prompts that
continue a cached output.

Numbers below are the tensor parallel sizes that passed. *Layouts* are part of every test run, on one
configuration of each family, most with odd numbers of heads: TP n is `-tp n`, DP n `-dp n`, and EP
`--enable-expert-parallel`, for families with experts. DP n + EP is also what `-tp n --enable-dp-attention`
runs. The engines of DP have different prompts, so that some are idle while others work. DCP n is
`--decode-context-parallel-size n`, for MLA without sparse attention. The collectives of each step are
counted, and the bytes of each rank's weights. DP without EP is n engines that share nothing.
"""


def main() -> None:
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(document(json.loads(PROVEN.read_text(encoding="utf-8"))), encoding="utf-8")


def document(record: dict[str, Any]) -> str:
    """The whole page."""
    families: dict[str, list[str]] = defaultdict(list)
    for name, entry in record.items():
        families[entry["family"]].append(name)
    sections = [_overview(record, families)]
    sections += [_section(family, record, names) for family, names in families.items()]
    head, *rows = contents_table()
    return "\n".join([_HEAD, _table(head, rows), _TESTED, *sections])


def _overview(record: dict[str, Any], families: dict[str, list[str]]) -> str:
    """A row per family: the tensor parallel sizes that passed with all its configurations."""
    rows = []
    for family, names in families.items():
        entries = [record[name] for name in names]
        architectures = ", ".join(f"`{name}`" for name in _values(entries, "architecture"))
        rows.append([f"`{family}`", architectures, str(len(names)), *_passed_by_all(entries)])
        rows[-1].append(", ".join(layout.name for layout in layouts_of(family)))
        rows[-1] += [min(_values(entries, "date")), ", ".join(_values(entries, "transformers"))]
    head = [
        "model_type",
        "architectures",
        "configurations",
        *PROOFS.values(),
        "layouts",
        "date",
        "transformers",
    ]
    return _table(head, rows)


def _values(entries: list[dict[str, Any]], field: str) -> list[str]:
    return sorted({entry[field] for entry in entries})


def _passed_by_all(entries: list[dict[str, Any]]) -> list[str]:
    cells = []
    for proof in PROOFS:
        sizes = set.intersection(*(set(entry["proven"][proof]) for entry in entries))
        cells.append(", ".join(map(str, sorted(sizes))))
    return cells


def _section(family: str, entries: dict[str, Any], names: list[str]) -> str:
    rows = [[f"`{name}`", _settings(entries[name]["config"])] for name in names]
    return f"## {family}\n\n" + _table(["configuration", "differs from the common one in"], rows)


def _settings(config: dict[str, Any]) -> str:
    return ", ".join(f"`{key}={json.dumps(value)}`" for key, value in config.items()) or "nothing"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    main()
