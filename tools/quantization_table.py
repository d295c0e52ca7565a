"""Writes docs/use/quantization.md: its table has the formats and models of tests/models/test_quantized.py.

python -m tools.quantization_table
"""

from pathlib import Path

from atom.shared.config.online_quantization import FORMATS as ONLINE_FORMATS
from tests.helpers.checkpoints.four_bits import FOUR_BIT_FORMATS
from tests.helpers.checkpoints.quantized_formats import (
    FORMATS,
    QUANTIZED_MODELS,
    StoredFormat,
    parts_quantized,
)

DOCUMENT = Path(__file__).resolve().parents[1] / "docs/use/quantization.md"

_HEAD = """\
# Quantized checkpoints

The server finds the format of a checkpoint by `quantization_config` in config.json (in older files
`compression_config`), or by hf_quant_config.json or quantize_config.json next to it, and says what it
found when it starts: one line for each format, with the number of its layers. What cannot run is
refused by name, in one line, before weights are loaded. Weights stay packed in memory as the file has
them.

- Layers may have different formats: groups and targets of compressed-tensors, `layer_quant_config` of
  quark, `quantized_layers` of modelopt. The experts of a layer must have the same one. Modules that are
  one matrix multiplication here (q, k and v; gate and up) are dequantized if they differ.
- Exclusions match as each method does: compressed-tensors by exact path, or by a regular expression
  after `re:` from the start of the path; quark by exact path, `re:` or glob; modelopt by glob or as a
  part of the path; fp8, fbgemm_fp8 and mxfp4 by whole names of the path, `re:` or glob. Embeddings,
  norms, routers and the LM head are plain. A pattern that names only some experts of a layer is refused.
- Scales may have any float type. Of matrices with one scale each that are multiplied as one, each keeps
  its own; a static scale of their inputs is the largest.
- Static scales of INT8 inputs are not needed: kernels that round inputs scale each token on its own.
- One scale for a tensor is repeated for its rows; blocks of 128 x 128 may have e8m0 scales.
- Llama 4 and Qwen3-VL stack their experts, inputs before outputs. In that layout FP8 is read in blocks, as
  in Qwen's checkpoints (`gate_up_proj_scale_inv`), and per channel, as transformers saves fbgemm_fp8
  (`gate_up_proj_scale`). All formats of the table are read from tensors of each expert, as in Llama 4
  Maverick in FP8, which is a compressed-tensors checkpoint.
- NVFP4 (modelopt, compressed-tensors) is read packed on a CPU, as integers of six bits; on a GPU it is
  dequantized when it is loaded, and takes four times the memory of the file. Activations are not rounded.
- A rank keeps whole blocks or groups: `-tp` with features that would cut one is refused.
- `kv_b_proj` of multi-head latent attention is dequantized when it is loaded, because absorbed
  attention multiplies by its transpose, whose blocks have other scales. So are the projections of
  Qwen3-Next whose rows are reordered. The server says how many layers are dequantized.
- An FP8 KV cache that the checkpoint asks for (`kv_cache_scheme`, modelopt's `kv_cache_quant_algo`,
  quark's `kv_cache_group`) is used unless `--kv-cache-dtype bf16` is given. Other formats of the cache,
  such as INT8 and NVFP4, are refused by name, unless `--kv-cache-dtype` chooses one that is supported.
- Checkpoints may state scales of the KV cache (`k_scale`, `v_scale`, `output_scale` and their older
  names). They are accepted and not applied: in an FP8 cache each token and head has scales of its own
  (each token of latents), which are computed when it is written. The server says so at start.
  Stated ones are coarser: the perplexity of SmolLM2-135M rises by 0.7 % (standard error 0.1 %) with scales
  of tokens and heads, by 1.0 % (0.2 %) with one for each layer, measured on the same text
  (`python -m tests.helpers.engine.cache_scales`).
- Activations are multiplied in the model's dtype unless a kernel rounds them to 8 bits, which FP8 and
  INT8 formats allow, or on an MI350 to MXFP4, for weights in that format.

## What is tested

Each cell is a tiny random model in the layout of its method, saved as that method publishes it: the logits
of every position equal those of transformers with the dequantized numbers, within 0.0001 in float32 on a
CPU (0.003 for INT4 and INT8: its kernels round activations to 16 bits). Numbers are the tensor parallel
sizes that passed; *all* and *linear* say which layers are quantized. GPT-OSS stacks its experts, which
only MXFP4 stores quantized. `make docs` writes this page from the rows of
`tests/models/test_quantized.py`, and `make test-models` runs them all. `make test-formats` loads
checkpoints that compressed-tensors itself writes (FP8, FP8_DYNAMIC, FP8_BLOCK, W8A8).
"""

_ONLINE = """
## Online quantization

`--online-quant-config` quantizes a plain checkpoint while it loads. It takes a JSON object:

```
--online-quant-config '{"global_quant_config": "ptpc_fp8", "layer_quant_config": {"*expert*": "mxfp4"},
                        "exclude_layer": ["*self_attn*"]}'
```

`exclude_layer` is tried first, then the patterns of `layer_quant_config` in their order, then
`global_quant_config`; a layer that nothing names stays plain. Patterns are globs, whole names of a path, or
regular expressions after `re:`. Embeddings, the LM head, routers and norms are always plain, and so are
`kv_b_proj`, the indexer of sparse attention and linear attention. A checkpoint that is quantized already is
refused, and so is a matrix whose sizes a format does not divide: name it in `exclude_layer`. So is a
pattern that names no layer, or only layers that another pattern before it decides.

FORMATS
Each matrix is rounded as soon as it is read, a million numbers at a time, so the plain model is never in
memory. A model of 392 MiB in bfloat16 becomes 213 MiB of weights with `ptpc_fp8`, and loading it needs 32 MiB
more, or 72 MiB with mapped files (`python -m tests.helpers.engine.load_memory online NEW_DIR 64 12`). All
ranks of a tensor-parallel group get parts of the same numbers.

INT4 has zero points, and each group takes the range, of five, with the smallest squared error. A group of
MXFP4 takes the better of two exponents, a row or block of FP8 the best of eight scales.

### Perplexity

SmolLM2-135M-Instruct in float32 on a CPU, eight windows of 512 tokens from Python's language reference:
`python -m benchmarks.quantization --model DIRECTORY --device cpu --dtype float32 --max-model-len 1024 \\
--windows 8 --exclude 'per_block_fp8=*qkv_proj' --formats` and the names below; the directory is made of
the GGUF file by `python -m tools.expand_gguf`. Its 576 inputs are no multiple of 128: `int4_g128` does not
fit, and in `per_block_fp8` q, k and v stay plain. Rounding is to the nearest, without calibration, and so
small a model bears less of it than larger ones do.

FP8's scales matter: over twenty windows, weights cost 0.2 % (standard error 0.2 %) with them, 2.0 % if each
row's largest number becomes 448, and 0.4 to 3.1 % with other multiples of those scales: they decide where
numbers are between two powers of two, and so how exactly a float has them. This is the cost of the weights.
A kernel that also rounds activations to FP8, each token with a scale of its own, adds 1.0 %; both together
cost 1.3 %.

| format | perplexity | change | weights |
| --- | --- | --- | --- |
QUALITY
## CPU

INT4 in groups of 16 inputs or more, INT8 and the integers of GGUF files are read packed by kernels in C++,
in bfloat16 and float32; a row does not depend on the others of its step, but for its last bits with AMX,
which multiplies five rows of bfloat16 and more. Rows of bfloat16 are multiplied as they are where the CPU
multiplies pairs of it (AVX-512). All others are rounded to integers of 16 bits, each group of inputs that
shares a scale by its largest number, and multiplied by integer instructions, whose sums are exact: with
SmolLM2's Q4_1 file the log probabilities of 3,622 tokens differ by 0.0003 on average, and at most 0.0024,
from those with weights dequantized to float32. Where there is no C++ compiler, torch's own kernels read
INT4 and INT8 in bfloat16. All other formats, and experts but those of GGUF files, multiply by numbers
dequantized in every step, a tile at a time, which is slow: eight experts of 2,048 x 768 in Q4_K's format take
13 ms for a token, 182 that way and 18 in bfloat16 (CPU time of one core with AVX-512, on a busy machine).

### GGUF

A file is converted once, into `ATOM_CACHE_DIR`, one matrix at a time. Matrices of these types keep their
integers; of others (IQ1 to IQ3, TQ…) each number becomes a float32 there, and is rounded to the compute
dtype in memory. So do routers, and DeepSeek's projections of latents to keys and values (`attn_k_b`,
`attn_v_b`), whatever their types are.

| type | integers in memory | bits of a weight |
| --- | --- | --- |
| Q4_0 | 4 bits, a scale for 32 | 4.5 |
| Q4_1 | 4 bits, a scale and an offset for 32 | 5 |
| Q4_K | 4 bits, a scale and an offset of 8 bits for 32 | 4.6 |
| Q2_K | 4 bits, a scale and an offset of 8 bits for 16 | 5.1 |
| Q3_K | 4 bits, a scale of 8 bits for 16 | 4.6 |
| Q5_0 | 6 bits, a scale for 32 | 6.5 |
| Q5_1 | 6 bits, a scale and an offset for 32 | 7 |
| Q5_K | 6 bits, a scale and an offset of 8 bits for 32 | 6.6 |
| Q6_K | 6 bits, a scale of 8 bits for 16 | 6.6 |
| Q8_0, IQ4_NL | 8 bits, a scale for 32 | 8.5 |
| IQ4_XS | 8 bits, a scale of 8 bits for 32 | 8.3 |

Integers are multiplied as they are, and sums of a group are scaled in float32, by the file's numbers;
activations are not rounded to 8 bits, as they are in llama.cpp. Matrices that are multiplied together (q,
k and v; gate and up) all get the widest of their formats, so that q and k take 6 bits where v is Q6_K. An
embedding is plain in memory, also where a tied LM head is not. On GPUs, and without a C++
compiler, all are dequantized when they are loaded.

Experts keep the types of this table too: gate and up in one format, down in another where the file has it so
(Q6_K next to Q4_K), if gate and up, or the outputs of down, are a multiple of 16 on each rank; else they are
dequantized when they are loaded. Experts in MXFP4 stay so on CPUs and GPUs, those of GPT-OSS if all matrices
of a layer are MXFP4. On a CPU only those in MXFP4 are dequantized in every step.

A Llama of 1.4 billion random weights on two cores of an AMD EPYC with AVX-512, one stream, two rounds
alternately with llama.cpp (llama-cpp-python 0.3.36, built there, two threads); F16 at other times. The
memory's speed varies. ATOM: medians of
`python -m benchmarks.latency --model FILE.gguf --input-len 128 --output-len 48 --batch-size 1`

| type | ms a token | llama.cpp | first token of 128, ms | llama.cpp |
| --- | --- | --- | --- | --- |
| Q4_0 | 28 and 25 | 23 and 26 | 502 and 531 | 679 and 681 |
| Q4_K, and Q6_K for half of v and down | 33 and 28 | 25 and 25 | 553 and 555 | 778 and 779 |
| Q8_0 | 34 and 34 | 39 and 46 | 514 and 531 | 1,303 and 1,275 |
| F16, in ATOM bfloat16 | 53 and 73 | 70 | 454 and 426 | 1,019 |

Without AMX, steps of many rows are slower than with a bfloat16 matrix: at 64 rows 0.86 times as fast, with
offsets 0.76, at 512 rows 0.9 and 0.8. SmolLM2 from its Q4_1 file, over HTTP as in
[steps](../measurements/steps.md#on-two-cpu-cores), four rounds: 110 to 126 output tokens/s with one stream
(79 and 88 in bfloat16 then), 448 to 502 with 16 (592, 601), 850 to 892 with 64 (1,081, 1,124), 316 to 329
with a prefix in common (342, 352).

With AMX, two cores of a Xeon (Sapphire Rapids), 2026-11-26: the linear layers of a step of SmolLM2 from that
file, milliseconds, against the same kernels without AMX and a bfloat16 model by oneDNN, which has AMX too:

| rows | 1 | 5 to 8 | 16 | 64 | 256 |
| --- | --- | --- | --- | --- | --- |
| by AMX | 6.4 | 12 to 13 | 15.7 | 36 | 115 |
| without | 6.8 | 21 | 33.9 | 117 | 447 |
| bfloat16, oneDNN | 19 to 22 | 20 to 23 | 20 to 25 | 30 to 32 | 62 to 75 |

Over HTTP there, before and now: 49 and 54 output tokens/s with one stream, 141 and 261 with 16, 244 and 552
with 64; the first token of 128 alone after 198 and 91 ms.
"""

_QUALITY = """\
| plain | 14.762 | +0.00 % | 621 MiB |
| ptpc_fp8 | 14.826 | +0.43 % | 318 MiB |
| per_block_fp8 | 14.835 | +0.49 % | 365 MiB |
| ptpc_int8 | 14.771 | +0.06 % | 318 MiB |
| int4_g64 | 18.925 | +28.20 % | 275 MiB |
| int4_g32 | 17.921 | +21.40 % | 283 MiB |
| mxfp4 | 21.658 | +46.71 % | 270 MiB |
"""


def main() -> None:
    DOCUMENT.write_text(document(), encoding="utf-8")


def document() -> str:
    """The whole page."""
    head = ["quant_method", "format", "in memory", *(f"`{model.model_type}`" for model in QUANTIZED_MODELS)]
    lines = [head, ["---"] * len(head), *map(_row, FORMATS + FOUR_BIT_FORMATS)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    formats = "".join(f"- `{name}`: {text}\n" for name, text in ONLINE_FORMATS.items())
    online = _ONLINE.replace("FORMATS\n", f"{formats}\n").replace("QUALITY\n", f"{_QUALITY}\n")
    return f"{_HEAD}\n{table}{online}"


def _row(format: StoredFormat) -> list[str]:
    cells = [f"{parts_quantized(model, format)}: 1, 2" for model in QUANTIZED_MODELS]
    return [f"`{format.method}`", format.name, format.scheme, *cells]


if __name__ == "__main__":
    main()
