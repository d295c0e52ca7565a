"""What a checkpoint's directory may hold, and what becomes of it: rows of a table in docs/use/models.md.

Each row changes a directory that has config.json, model.safetensors and tokenizer.json.
"""

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, models

from atom.shared.config.checkpoint import Checkpoint
from tests.helpers.checkpoints.gguf_files import TOKENS, hf_weights, write_gguf

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
    "eos_token_id": 300,
}
END, TURN = "<|end|>", "<|turn|>"
EMBEDDINGS = np.ones((1000, 2), np.float32)


@dataclass(frozen=True)
class Content:
    """A row of the table."""

    kind: str
    holds: str
    result: str
    change: Callable[[Path], None]
    """Changes the directory."""
    shows: Callable[[Checkpoint], object] | str
    """Whether the checkpoint shows the result; or a part of the error."""


def write(directory: Path, name: str, content: object) -> None:
    """A file of text, or of JSON."""
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def save_tensors(directory: Path, name: str, **tensors: np.ndarray[Any, Any]) -> None:
    """A safetensors file; two underscores stand for a dot."""
    save_file({key.replace("__", "."): array for key, array in tensors.items()}, directory / name)


def save_base(directory: Path) -> None:
    """The files that all rows begin with."""
    write(directory, "config.json", CONFIG)
    save_tensors(directory, "model.safetensors", model__embed_tokens__weight=EMBEDDINGS)
    made = Tokenizer(models.BPE({chr(97 + i): i for i in range(26)}, []))
    made.add_tokens([AddedToken(END, special=True), AddedToken(TURN, special=True)])
    made.save(str(directory / "tokenizer.json"))


def _gguf_parts(directory: Path) -> None:
    (directory / "config.json").unlink()
    write_gguf(directory / "m.gguf", hf_weights(), tensors_per_part=8)


def save_ranks(directory: Path) -> None:
    """tiktoken.model with all bytes."""
    lines = [b"%s %d" % (base64.b64encode(bytes([byte])), byte) for byte in range(256)]
    (directory / "tiktoken.model").write_bytes(b"\n".join(lines))


def save_tekken(directory: Path) -> None:
    """tekken.json with all bytes."""
    vocab = [{"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode()} for i in range(256)]
    config = {"pattern": ".+", "default_vocab_size": 276, "default_num_special_tokens": 20}
    write(directory, "tekken.json", {"config": config, "vocab": vocab})


def _configured(**changes: Any) -> Callable[[Path], None]:
    return lambda directory: write(directory, "config.json", {**CONFIG, **changes})


def _with(name: str, content: object) -> Callable[[Path], None]:
    return lambda directory: write(directory, name, content)


def _all(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        for each in changes:
            each(directory)

    return change


def _without(name: str, then: Callable[[Path], None] | None = None) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        (directory / name).unlink()
        if then is not None:
            then(directory)

    return change


def _shards(*names: str) -> Callable[[Path], None]:
    def save(directory: Path) -> None:
        for number, name in enumerate(names):
            save_tensors(directory, name, **{f"tensor{number}": EMBEDDINGS})

    return _without("model.safetensors", save)


def _indexed(directory: Path) -> None:
    _shards("model-00001-of-00002.safetensors")(directory)
    files = {"tensor0": "model-00001-of-00002.safetensors", "tensor1": "model-00002-of-00002.safetensors"}
    write(directory, "model.safetensors.index.json", {"weight_map": files})


def _tied(head: np.ndarray[Any, Any]) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        _configured(tie_word_embeddings=True)(directory)
        tensors = {"model__embed_tokens__weight": EMBEDDINGS, "lm_head__weight": head}
        save_tensors(directory, "model.safetensors", **tensors)

    return change


def _kimi(directory: Path) -> None:
    save_ranks(directory)
    write(directory, "tokenizer_config.json", {"tokenizer_class": "TikTokenTokenizer"})


def _tokens(checkpoint: Checkpoint) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint.tokenizer_file))


def _templates(checkpoint: Checkpoint) -> tuple[str | None, ...]:
    files = (checkpoint.chat_template_file, checkpoint.tool_template_file)
    return tuple(Path(file).read_text(encoding="utf-8") if file else None for file in files)


_NAMED = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
_SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
_OUTSIDE = {"added_tokens_decoder": {"28": {"content": "<x>", "special": True, "normalized": False}}}
_PROCESSOR = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16}
_SEEING = _configured(
    architectures=["Qwen3VLForConditionalGeneration"],
    model_type="qwen3_vl",
    vision_config={"depth": 1, "patch_size": 16},
    image_token_id=7,
)

CONTENTS: list[Content] = [
    Content("weights", "`model.safetensors`", "read", lambda directory: None, lambda found: found.dtype),
    Content(
        "weights",
        "shards with `model.safetensors.index.json`",
        "read; a missing one is named",
        _indexed,
        "model-00002-of-00002.safetensors is missing",
    ),
    Content(
        "weights",
        "`model-0000n-of-0000m.safetensors` without an index",
        "read; a missing one is named",
        _shards(*_SHARDS),
        lambda found: not found.warnings,
    ),
    Content("weights", "some of these only", "refused", _shards(_SHARDS[1]), f"{_SHARDS[0]} is missing"),
    Content(
        "weights",
        "`consolidated*.safetensors` besides others",
        "neither fetched nor read",
        lambda directory: save_tensors(directory, "consolidated.safetensors", wq=EMBEDDINGS),
        lambda found: not found.warnings,
    ),
    Content(
        "weights",
        "`consolidated*.safetensors` only",
        "refused",
        _shards("consolidated.safetensors"),
        "format of Mistral only",
    ),
    Content(
        "weights",
        "`pytorch_model.bin`, `.pt` only",
        "refused",
        _without("model.safetensors", _with("pytorch_model.bin", "x")),
        "has no safetensors files",
    ),
    Content(
        "weights",
        "`tie_word_embeddings` and an equal `lm_head.weight`",
        "tied",
        _tied(EMBEDDINGS),
        lambda found: found.hf_config["tie_word_embeddings"] and not found.warnings,
    ),
    Content(
        "weights",
        "`tie_word_embeddings` and another `lm_head.weight`",
        "not tied, as in transformers, with a warning",
        _tied(EMBEDDINGS * 2),
        lambda found: not found.hf_config["tie_word_embeddings"] and "lm_head" in found.warnings[0],
    ),
    Content("config.json", "no architecture", "refused", _configured(architectures=None), "no architecture"),
    Content(
        "config.json",
        "an architecture that is not supported",
        "refused, with those that are",
        _configured(architectures=["FalconForCausalLM"]),
        "FalconForCausalLM is not supported",
    ),
    Content(
        "config.json",
        "`torch_dtype`, `rope_scaling`, `rope_theta`",
        "read as today's names",
        _configured(rope_theta=7.0),
        lambda found: found.hf_config["rope_parameters"]["rope_theta"] == 7,
    ),
    Content(
        "config.json",
        "no dtype, or `auto`",
        "that of the weights",
        _configured(dtype="auto"),
        lambda found: found.dtype == "float32",
    ),
    Content(
        "config.json",
        "dtype `float64`, float8",
        "refused without `--dtype`",
        _configured(dtype="float64"),
        "choose one of bfloat16",
    ),
    Content(
        "config.json",
        "`auto_map` and Python files",
        "never run",
        _configured(auto_map={"AutoModel": "m.Model"}),
        lambda found: found.architecture,
    ),
    Content(
        "config.json",
        "`quantization_config` or `quantize_config.json`, `hf_quant_config.json`",
        "read; formats that cannot run are refused",
        _with("quantize_config.json", {"bits": 3}),
        "bits 3",
    ),
    Content(
        "ends",
        "`eos_token_id` in generation_config.json",
        "in place of that of config.json",
        _with("generation_config.json", {"eos_token_id": [301, 302]}),
        lambda found: found.eos_token_ids == [301, 302],
    ),
    Content(
        "ends",
        "null there",
        "that of config.json",
        _with("generation_config.json", {"eos_token_id": None}),
        lambda found: found.eos_token_ids == [300],
    ),
    Content(
        "ends",
        "another `eos_token` of the tokenizer",
        "ends too, with a warning",
        _with("tokenizer_config.json", {"eos_token": TURN}),
        lambda found: found.eos_token_ids == [300, 27] and "(27)" in found.warnings[0],
    ),
    Content(
        "tokenizer",
        "`tokenizer.json`",
        "used",
        lambda directory: None,
        lambda found: found.tokenizer_file == f"{found.directory}/tokenizer.json",
    ),
    Content(
        "tokenizer",
        "tokens in tokenizer_config.json, special_tokens_map.json, added_tokens.json",
        "added, with the ids of transformers",
        _with("tokenizer_config.json", _OUTSIDE),
        lambda found: _tokens(found).token_to_id("<x>") == 28,
    ),
    Content(
        "tokenizer",
        "one that the model's vocabulary has no place for",
        "left out, with a warning",
        _all(_configured(vocab_size=28), _with("tokenizer_config.json", {"pad_token": "<pad>"})),
        lambda found: _tokens(found).token_to_id("<pad>") is None and "'<pad>'" in found.warnings[0],
    ),
    Content(
        "tokenizer",
        "`tiktoken.model` (Kimi, Moonlight)",
        "converted",
        _without("tokenizer.json", _kimi),
        lambda found: _tokens(found).encode("a").ids == [97],
    ),
    Content(
        "tokenizer",
        "`tiktoken.model` of another class",
        "refused",
        _without("tokenizer.json", save_ranks),
        "for the tokenizer_class TikTokenTokenizer",
    ),
    Content(
        "tokenizer",
        "`tekken.json` (Mistral)",
        "converted; it adds `<s>`",
        _without("tokenizer.json", save_tekken),
        lambda found: _tokens(found).encode("a").ids == [1, 117],
    ),
    Content(
        "tokenizer",
        "`tokenizer.model` only",
        "converted, if sentencepiece and protobuf are installed",
        _without("tokenizer.json", _with("tokenizer.model", "x")),
        "tokenizer.model",
    ),
    Content(
        "tokenizer",
        "none",
        "token ids only",
        _without("tokenizer.json"),
        lambda found: found.tokenizer_file is None,
    ),
    Content(
        "templates",
        "`chat_template.jinja`",
        "used",
        _with("chat_template.jinja", "j"),
        lambda found: _templates(found) == ("j", None),
    ),
    Content(
        "templates",
        "`chat_template` in tokenizer_config.json or chat_template.json",
        "used",
        _with("chat_template.json", {"chat_template": "j"}),
        lambda found: _templates(found) == ("j", None),
    ),
    Content(
        "templates",
        "a list of them",
        "`default`, and `tool_use` for conversations with tools",
        _with("tokenizer_config.json", {"chat_template": _NAMED}),
        lambda found: _templates(found) == ("d", "t"),
    ),
    Content(
        "templates",
        "`additional_chat_templates/tool_use.jinja`",
        "for conversations with tools",
        _all(_with("chat_template.jinja", "d"), _with("additional_chat_templates/tool_use.jinja", "t")),
        lambda found: _templates(found) == ("d", "t"),
    ),
    Content(
        "templates",
        "none, of DeepSeek-V3.2",
        "its published encoding, as a template of ours",
        _configured(architectures=["DeepseekV32ForCausalLM"], model_type="deepseek_v32"),
        lambda found: "<｜DSML｜function_calls>" in str(_templates(found)[0]),
    ),
    Content(
        "templates",
        "none, of DeepSeek-V4",
        "its published encoding, as a template of ours; `encoding/encoding_dsv4.py` tells the levels of "
        "`reasoning_effort`, and is never run",
        _all(
            _configured(architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4"),
            _with("encoding/encoding_dsv4.py", "REASONING_EFFORT_PROMPTS = {}"),
        ),
        lambda found: "{%- set has_high_effort = true -%}" in str(_templates(found)[0]),
    ),
    Content(
        "templates",
        "none",
        "no conversations without `--chat-template`",
        lambda directory: None,
        lambda found: _templates(found) == (None, None),
    ),
    Content(
        "images",
        "`vision_config` of Qwen3-VL, Qwen3.5, Gemma 3 or Kimi-K2.5, and `preprocessor_config.json` or "
        "`processor_config.json`",
        "read",
        _all(_SEEING, _with("preprocessor_config.json", _PROCESSOR)),
        lambda found: found.images is not None and found.images.patch == 16,
    ),
    Content(
        "images",
        "an image processor of another kind, or none",
        "text alone, with a warning",
        _SEEING,
        lambda found: found.images is None and "preprocessor_config.json" in found.warnings[-1],
    ),
    Content(
        "images",
        "`vision_config` of another family",
        "text alone, with a warning",
        _configured(vision_config={"depth": 1}),
        lambda found: found.images is None and "vision model of llama" in found.warnings[-1],
    ),
    Content(
        "GGUF",
        "no config.json, and one GGUF model, in one file or in parts",
        "converted; a missing part is named",
        _gguf_parts,
        lambda found: found.vocab_size == len(TOKENS),
    ),
    Content(
        "GGUF",
        "no config.json, and several",
        "refused: one has to be named",
        _all(_gguf_parts, _with("other.gguf", "")),
        "2 models in GGUF files: give one of them",
    ),
]


def contents_table() -> list[list[str]]:
    """Head and rows of the table."""
    rows = []
    before = ""
    for each in CONTENTS:
        rows.append(["" if each.kind == before else each.kind, each.holds, each.result])
        before = each.kind
    return [["", "the directory holds", "result"], *rows]
