"""What rounding the KV cache to FP8 costs: scales of each token and head against those of a checkpoint.

    python -m tests.helpers.engine.cache_scales [WINDOWS]

prints the perplexity of SmolLM2-135M in transformers, float32, over windows of Python's language reference.
Static scales are measured on the same text, which is the best that a calibration can do.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer
from transformers.models.llama import modeling_llama

from benchmarks.quantization import prose
from tests.helpers.checkpoints.smollm2 import gguf_path, in_transformers

_LARGEST = 448.0
_WINDOW = 512

Rounding = Callable[[str, Tensor], Tensor]
"""Maps cached keys or values [..., head width] of the layer with that name."""


def rounded(x: Tensor, scale: Tensor | float) -> Tensor:
    return (x / scale).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).float() * scale


class Cache:
    """Rounds all that transformers' Llama would cache: keys after RoPE, and values."""

    def __init__(self, model: torch.nn.Module):
        self.rounding: Rounding = lambda name, x: x
        self._layer = 0
        rotate = modeling_llama.apply_rotary_pos_emb
        layers = model.model.layers  # type: ignore[union-attr]

        def rotate_and_cache(q: Tensor, k: Tensor, *args: object, **named: object) -> tuple[Tensor, Tensor]:
            q, k = rotate(q, k, *args, **named)
            self._layer = (self._layer + 1) % len(layers)  # type: ignore[arg-type]
            return q, self.rounding(f"k{self._layer}", k)

        modeling_llama.apply_rotary_pos_emb = rotate_and_cache
        for number, layer in enumerate(layers):  # type: ignore[arg-type]
            width = layer.self_attn.head_dim

            def cache(
                module: object, args: object, v: Tensor, name: str = f"v{number}", width: int = width
            ) -> Tensor:
                return self.rounding(name, v.unflatten(-1, (-1, width))).flatten(-2)

            layer.self_attn.v_proj.register_forward_hook(cache)


def main(windows: int) -> None:
    path = Path(gguf_path())
    model = in_transformers()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ids = torch.tensor(tokenizer(prose())["input_ids"][: windows * _WINDOW]).view(windows, _WINDOW)
    cache, largest = Cache(model), dict[str, float]()

    def measure(name: str, x: Tensor) -> Tensor:
        largest[name] = max(largest.get(name, 0.0), float(x.abs().max()))
        return x

    roundings: dict[str, Rounding] = {
        "plain": measure,
        "static": lambda name, x: rounded(x, largest[name] / _LARGEST),
        "scale 1": lambda name, x: rounded(x, 1.0),
        "token and head": lambda name, x: rounded(x, x.abs().amax(-1, keepdim=True).clamp(1e-9) / _LARGEST),
    }
    plain = 0.0
    for label, cache.rounding in roundings.items():
        found = perplexity(model, ids)
        plain = plain or found
        print(f"{label:>14}  {found:.3f}  {100 * (found / plain - 1):+.2f} %", flush=True)


@torch.inference_mode()
def perplexity(model: torch.nn.Module, ids: Tensor) -> float:
    losses = [
        torch.nn.functional.cross_entropy(model(window[None]).logits[0, :-1], window[1:]) for window in ids
    ]
    return math.exp(sum(map(float, losses)) / len(losses))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
