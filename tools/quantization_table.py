"""Writes docs/quantization.md: its table has the formats and models of tests/models/test_quantized.py.

python -m tools.quantization_table
"""

from pathlib import Path

from tests.helpers.four_bits import FOUR_BIT_FORMATS
from tests.helpers.quantized_formats import FORMATS, QUANTIZED_MODELS, StoredFormat, parts_quantized

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "quantization.md"

_HEAD = """\
# Quantized checkpoints

The server finds the format of a checkpoint by `quantization_config` in config.json (in older files
`compression_config`), or by hf_quant_config.json or quantize_config.json beside it, and says what it
found when it starts: one line for each format, with the number of its layers. What cannot run is
refused by name, in one line, before weights are loaded. Weights stay packed in memory as the file has
them.

- Layers may have different formats: groups and targets of compressed-tensors, `layer_quant_config` of
  quark, `quantized_layers` of modelopt. The experts of a layer must have the same one. Modules that are
  one matrix multiplication here (q, k and v; gate and up) are dequantized if they differ.
- Exclusions match as each method does: compressed-tensors by exact path, or by a regular expression
  after `re:` from the start of the path; quark by exact path, `re:` or glob; modelopt by glob or as a
  part of the path; fp8, fbgemm_fp8 and mxfp4 by whole names of the path, `re:` or glob. Embeddings,
  norms, routers and the LM head are plain.
- Scales may have any float type. Of matrices with one scale each that are multiplied as one, each keeps
  its own; a static scale of their inputs is the largest.
- One scale for a tensor is repeated for its rows; blocks of 128 x 128 may have e8m0 scales.
- A rank keeps whole blocks or groups: `-tp` with features that would cut one is refused.
- `kv_b_proj` of multi-head latent attention is dequantized when it is loaded, because absorbed
  attention multiplies by its transpose, whose blocks have other scales. So are the projections of
  Qwen3-Next whose rows are reordered. The server says how many layers are dequantized.
- Checkpoints may state scales of the KV cache (`k_scale`, `v_scale`, `output_scale` and their older
  names). They are accepted and not needed: with `--kv-cache-dtype fp8` each token and head has scales
  of its own (each token of latents), which are computed when it is written. The server says so at
  start.
- Activations are multiplied in the model's dtype unless a kernel rounds them to 8 bits, which FP8 and
  INT8 formats allow.

## What is tested

Each cell is a tiny random model in the layout of its method, saved as that method publishes it: the
logits of every position equal those of transformers with the dequantized numbers, within 0.0001 in
float32 on a CPU. Numbers are the tensor parallel sizes that passed; *all* and *linear* say which
layers are quantized. GPT-OSS stacks its experts, which only MXFP4 stores quantized. `make docs` writes
this page from the rows of `tests/models/test_quantized.py`, and `make test-models` runs them all.
`make test-formats` loads checkpoints that compressed-tensors itself writes (FP8, FP8_DYNAMIC, FP8_BLOCK,
W8A8).
"""


def main() -> None:
    DOCUMENT.write_text(document(), encoding="utf-8")


def document() -> str:
    """The whole page."""
    head = ["quant_method", "format", "in memory", *(f"`{model.model_type}`" for model in QUANTIZED_MODELS)]
    lines = [head, ["---"] * len(head), *map(_row, FORMATS + FOUR_BIT_FORMATS)]
    return _HEAD + "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _row(format: StoredFormat) -> list[str]:
    cells = [f"{parts_quantized(model, format)}: 1, 2" for model in QUANTIZED_MODELS]
    return [f"`{format.method}`", format.name, format.scheme, *cells]


if __name__ == "__main__":
    main()
