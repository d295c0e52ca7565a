"""From --model to a Checkpoint: directories, GGUF files, and what is refused."""

import errno
import json
import multiprocessing
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from atom.config.checkpoint import Checkpoint
from atom.config.model import ModelConfig
from atom.messages.launch import PrepareLaunch
from atom.messages.supervisor import Progress
from atom.utils.exit_status import ExitStatus
from atom.utils.process import spawn
from workers import hf_directory
from workers.prepare import _one_line, _status, expanded_gguf, prepare
from workers.weights import gguf as gguf_module

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
    "eos_token_id": 2,
}
DEADLINE_S = 60


def silent(phase: str, done: int, total: int) -> None:
    """A report that nobody reads."""


def write(directory: Path, name: str, content: Any) -> None:
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))


def model(path: str | Path) -> ModelConfig:
    return ModelConfig(model=str(path))


def without_weights(path: str | Path) -> ModelConfig:
    return ModelConfig(model=str(path), load_dummy=True)


def checkpoint_of(directory: Path, config: dict[str, Any] | None = None, **files: Any) -> Checkpoint:
    write(directory, "config.json", CONFIG | (config or {}))
    for name, content in files.items():
        write(directory, f"{name}.json", content)
    return prepare(without_weights(directory), directory / "cache", silent)


# Directories


def test_a_bare_directory(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path)
    assert checkpoint.architecture == "LlamaForCausalLM"
    assert (checkpoint.dtype, checkpoint.vocab_size, checkpoint.max_model_len) == ("bfloat16", 300, 2048)
    assert checkpoint.eos_token_ids == [2]
    assert checkpoint.tokenizer_file is None and checkpoint.chat_template_file is None
    assert checkpoint.hf_config["rope_parameters"] == {"rope_type": "default"}


@pytest.mark.parametrize(
    ("old", "new", "positions"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}, 2048),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
            4096,
        ),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "llama3", "factor": 8.0}},
            {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 2048},
            2048,
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
            2048,
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": None, "original_max_position_embeddings": 512}},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
            2048,
        ),
        (
            {"original_max_position_embeddings": 1024, "rope_scaling": {"type": "longrope"}},
            {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 1024},
            2048,
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 3.0}},
            {"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 2048},
            6144,
        ),
        (
            {"rope_theta": 7.0, "rope_parameters": {"rope_type": "linear", "rope_theta": 3.0, "factor": 4.0}},
            {"rope_type": "linear", "rope_theta": 3.0, "factor": 4.0},
            8192,
        ),
        (
            {"rope_theta": 3.0, "partial_rotary_factor": 0.5, "rope_scaling": None},
            {"rope_type": "default", "rope_theta": 3.0, "partial_rotary_factor": 0.5},
            2048,
        ),
    ],
)
def test_rope_in_its_old_and_new_form(
    tmp_path: Path, old: dict[str, Any], new: dict[str, Any], positions: int
) -> None:
    checkpoint = checkpoint_of(tmp_path, old)
    assert checkpoint.hf_config["rope_parameters"] == new
    assert checkpoint.max_model_len == positions
    assert not {"rope_scaling", "rope_theta", "partial_rotary_factor"} & checkpoint.hf_config.keys()


def test_rope_of_each_type_of_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rope_parameters for each type of layer"):
        checkpoint_of(tmp_path, {"rope_parameters": {"full_attention": {"rope_type": "default"}}})


def test_dtype_in_its_old_form_and_from_the_weights(tmp_path: Path) -> None:
    old = checkpoint_of(tmp_path / "old", {"dtype": None, "torch_dtype": "torch.float16"})
    assert old.dtype == old.hf_config["dtype"] == "float16"
    assert "torch_dtype" not in old.hf_config
    (tmp_path / "new").mkdir()
    tensors: dict[str, Any] = {"a": np.zeros(2, np.float32), "b": np.zeros((2, 2), np.float16)}
    save_file(tensors, tmp_path / "new" / "model.safetensors")
    assert checkpoint_of(tmp_path / "new", {"dtype": None}).dtype == "float16"


def test_generation_config(tmp_path: Path) -> None:
    generation = {
        "eos_token_id": [7, 2],
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": None,
        "repetition_penalty": 1.1,
        "no_repeat_ngram_size": 0,
        "typical_p": 0.9,
        "max_new_tokens": 5,
    }
    checkpoint = checkpoint_of(tmp_path, generation_config=generation)
    assert checkpoint.eos_token_ids == [7, 2]
    assert checkpoint.default_sampling == {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}
    assert checkpoint.ignored_defaults == ["typical_p=0.9"]


def test_sampling_defaults_count_only_where_the_checkpoint_samples(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, generation_config={"temperature": 0.6, "eos_token_id": 0})
    assert checkpoint.default_sampling == {}
    assert checkpoint.eos_token_ids == [0]


def test_template_tokens_as_text_and_as_objects(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(
        tmp_path,
        tokenizer_config={
            "bos_token": {"content": "<s>", "lstrip": False},
            "eos_token": "</s>",
            "pad_token": None,
        },
        special_tokens_map={"unk_token": "<unk>", "eos_token": "older"},
    )
    assert checkpoint.template_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.mark.parametrize(
    ("embedded", "text"),
    [
        ("one", "one"),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "only", "template": "o"}], "o"),
        ([{"name": "a", "template": "a"}, {"name": "b", "template": "b"}], None),
    ],
)
def test_embedded_chat_templates_become_files(tmp_path: Path, embedded: Any, text: str | None) -> None:
    checkpoint = checkpoint_of(tmp_path, tokenizer_config={"chat_template": embedded})
    found = checkpoint.chat_template_file
    assert (Path(found).read_text() if found else None) == text


def test_a_template_file_wins(tmp_path: Path) -> None:
    write(tmp_path, "chat_template.jinja", "file")
    checkpoint = checkpoint_of(tmp_path, tokenizer_config={"chat_template": "embedded"})
    assert checkpoint.chat_template_file == str(tmp_path / "chat_template.jinja")


@pytest.mark.parametrize(("processor", "needed"), [(None, True), ({"single": ["<s>", "$A"]}, False)])
def test_begin_token_that_tokenizer_json_leaves_to_the_caller(
    tmp_path: Path, processor: Any, needed: bool
) -> None:
    checkpoint = checkpoint_of(
        tmp_path,
        tokenizer={"post_processor": processor, "model": {}},
        tokenizer_config={"add_bos_token": True, "bos_token": "<s>"},
    )
    assert checkpoint.tokenizer_file == str(tmp_path / "tokenizer.json")
    assert checkpoint.add_bos_token is needed


def test_a_slow_tokenizer_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    write(tmp_path, "merges.txt", "#version: 0.2\nh i\n")
    files = {"vocab": vocabulary | {"hi": 256, "<|endoftext|>": 257}}
    checkpoint = checkpoint_of(tmp_path, tokenizer_config={"tokenizer_class": "GPT2Tokenizer"}, **files)
    assert checkpoint.tokenizer_file is not None
    assert Tokenizer.from_file(checkpoint.tokenizer_file).encode("hi").ids == [256]
    monkeypatch.setitem(sys.modules, "transformers", None)  # importing it again would fail
    assert (
        prepare(without_weights(tmp_path), tmp_path / "cache", silent).tokenizer_file
        == checkpoint.tokenizer_file
    )


def test_packed_experts_of_gpt_oss_are_kept_by_the_name_of_their_form(tmp_path: Path) -> None:
    """As published: no dtype is named, and bytes say nothing about it."""
    packed = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config = {"model_type": "gpt_oss", "dtype": None, "quantization_config": packed}
    blocks = np.zeros((2, 64, 2, 16), np.uint8)
    save_file({"a.blocks": blocks, "b.weight": np.zeros((4, 4), np.float16)}, tmp_path / "model.safetensors")
    checkpoint = checkpoint_of(tmp_path, config)
    assert checkpoint.hf_config["quantization_config"] == {"quant_method": "mxfp4"}
    assert checkpoint.dtype == "float16"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": []}, "names no architecture"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantized \(awq\)"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, r"quantized \(mxfp4\)"),
        (
            {"model_type": "gpt_oss", "quantization_config": {"quant_method": "fp8"}},
            r"quantized \(fp8\): not supported yet",
        ),
        ({"vocab_size": None}, "has no vocab_size: LlamaForCausalLM"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn, which is not supported"),
    ],
)
def test_configurations_that_cannot_run_are_refused(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        checkpoint_of(tmp_path, config)


def test_broken_json_is_named(tmp_path: Path) -> None:
    write(tmp_path, "config.json", "{")
    with pytest.raises(ValueError, match=r"config\.json holds no valid JSON"):
        prepare(without_weights(tmp_path), tmp_path, silent)


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, "weights.bin", "x")
    for path, words in (
        ("./no/such/place", r"no such path; give .* a name on the hub"),
        (str(tmp_path / "weights.bin"), r"no \.gguf"),
        (str(tmp_path), "holds no config.json: give"),
    ):
        with pytest.raises(ValueError, match=words):
            prepare(model(path), tmp_path, silent)
    write(tmp_path, "a.gguf", "x")
    with pytest.raises(ValueError, match=r"give one of them, such as .*a\.gguf"):
        prepare(without_weights(tmp_path), tmp_path, silent)
    with pytest.raises(ValueError, match=r"a\.gguf is no readable GGUF file"):
        prepare(model(tmp_path / "a.gguf"), tmp_path, silent)


# GGUF files

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN = 4, 2, 8, 32, 64
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*BYTES, "hi", "12", "ĠĠ", "<|bos|>", "<|end|>"]


def hf_weights(tied: bool = False) -> dict[str, np.ndarray]:
    """Random weights of a one-layer Llama under their Hugging Face names."""
    random = np.random.default_rng(0)
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (len(TOKENS), HIDDEN),
        "model.norm.weight": (HIDDEN,),
        **({} if tied else {"lm_head.weight": (len(TOKENS), HIDDEN)}),
        layer + "input_layernorm.weight": (HIDDEN,),
        layer + "post_attention_layernorm.weight": (HIDDEN,),
        layer + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        layer + "mlp.gate_proj.weight": (FFN, HIDDEN),
        layer + "mlp.up_proj.weight": (FFN, HIDDEN),
        layer + "mlp.down_proj.weight": (HIDDEN, FFN),
    }
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def as_pairs(array: np.ndarray, heads: int) -> np.ndarray:
    """The order of rows that a GGUF has: written out, row by row."""
    made = np.empty_like(array)
    dim = array.shape[0] // heads
    for head in range(heads):
        for i in range(dim // 2):
            made[head * dim + 2 * i] = array[head * dim + i]
            made[head * dim + 2 * i + 1] = array[head * dim + dim // 2 + i]
    return made


def write_gguf(
    path: Path, weights: dict[str, np.ndarray], kind: str = "llama", packed: Any = None, **more: Any
) -> None:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["h i", "1 2", "Ġ Ġ"])
    writer.add_token_types([1] * (len(TOKENS) - 2) + [3, 3])
    writer.add_bos_token_id(TOKENS.index("<|bos|>"))
    writer.add_eos_token_id(TOKENS.index("hi"))
    writer.add_eot_token_id(TOKENS.index("<|end|>"))
    writer.add_chat_template("{{ messages }}")
    for key, value in more.items():
        getattr(writer, key)(value)
    for name, array in weights.items():
        if ".q_proj" in name or ".k_proj" in name:
            array = as_pairs(array, HEADS if ".q_proj" in name else KV_HEADS)
        stored = names.get_name(name, try_suffixes=(".weight",)) or name
        if packed is not None and array.ndim > 1:
            writer.add_tensor(stored, gguf.quants.quantize(array, packed), raw_dtype=packed)
        else:
            writer.add_tensor(stored, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_becomes_the_weights_that_it_was_made_of(tmp_path: Path) -> None:
    weights = hf_weights()
    write_gguf(tmp_path / "m.gguf", weights)
    checkpoint = prepare(model(tmp_path / "m.gguf"), tmp_path / "cache", silent)
    made = load_file(Path(checkpoint.directory) / "model.safetensors")
    assert made.keys() == weights.keys()
    for name, array in weights.items():
        np.testing.assert_array_equal(made[name], array, err_msg=name)
    config = checkpoint.hf_config
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 8)
    assert (config["tie_word_embeddings"], config["attention_bias"]) == (False, False)
    assert (checkpoint.dtype, checkpoint.vocab_size, checkpoint.max_model_len) == (
        "float32",
        len(TOKENS),
        512,
    )
    assert checkpoint.eos_token_ids == [TOKENS.index("hi"), TOKENS.index("<|end|>")]
    assert checkpoint.template_tokens["bos_token"] == "<|bos|>"
    assert checkpoint.add_bos_token is False  # tokenizer.json adds it itself
    assert checkpoint.chat_template_file is not None
    assert Path(checkpoint.chat_template_file).read_text() == "{{ messages }}"


def test_a_gguf_tokenizer_cuts_merges_and_frames(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", hf_weights(tied=True))
    checkpoint = prepare(model(tmp_path / "m.gguf"), tmp_path / "cache", silent)
    assert checkpoint.hf_config["tie_word_embeddings"] is True
    assert checkpoint.tokenizer_file is not None
    tokenizer = Tokenizer.from_file(checkpoint.tokenizer_file)
    assert tokenizer.encode("hi<|end|>").tokens == ["<|bos|>", "hi", "<|end|>"]
    assert tokenizer.encode("1212", add_special_tokens=False).tokens == ["12", "1", "2"]  # words of 3 digits
    text = "naïve 中文 🍕\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_quantized_weights_are_expanded_and_served_in_16_bits(tmp_path: Path) -> None:
    weights = hf_weights()
    write_gguf(tmp_path / "m.gguf", weights, packed=gguf.GGMLQuantizationType.Q8_0)
    checkpoint = prepare(model(tmp_path / "m.gguf"), tmp_path / "cache", silent)
    made = load_file(Path(checkpoint.directory) / "model.safetensors")
    assert checkpoint.dtype == "bfloat16"
    for name, array in weights.items():
        assert made[name].dtype == np.float32
        np.testing.assert_allclose(made[name], array, atol=0.03, err_msg=name)


def test_large_models_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_module, "MAX_SHARD_BYTES", 40_000)
    weights = hf_weights()
    write_gguf(tmp_path / "m.gguf", weights)
    directory = Path(prepare(model(tmp_path / "m.gguf"), tmp_path / "cache", silent).directory)
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == weights.keys()
    assert len(set(index.values())) > 1
    for file_name in set(index.values()):
        found = load_file(directory / file_name)
        assert found.keys() == {name for name, file in index.items() if file == file_name}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "gemma3"}, "kind gemma3; supported are llama, qwen3"),
        ({"add_expert_count": 8}, "mixture of experts"),
        ({"add_rope_dimension_count": 4}, "lacks .*_proj.weight in the shape"),
        ({"add_tokenizer_pre": "unheard-of"}, "unheard-of"),
        ({"add_tokenizer_model": "llama", "add_add_space_prefix": False}, "without a space"),
        ({"add_tokenizer_model": "bert"}, "cannot be expanded: .*'bert'"),
    ],
)
def test_ggufs_that_cannot_run_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    write_gguf(tmp_path / "m.gguf", hf_weights(), **change)
    with pytest.raises(ValueError, match=words):
        prepare(model(tmp_path / "m.gguf"), tmp_path / "cache", silent)
    assert not list((tmp_path / "cache").glob("gguf/*.partial"))


def test_every_tensor_must_find_its_place(tmp_path: Path) -> None:
    weights = hf_weights()
    write_gguf(tmp_path / "more.gguf", weights | {"blk.0.mystery.weight": np.zeros(4, np.float32)})
    with pytest.raises(ValueError, match=r"'blk\.0\.mystery\.weight'"):
        prepare(model(tmp_path / "more.gguf"), tmp_path / "cache", silent)
    del weights["model.norm.weight"]
    write_gguf(tmp_path / "fewer.gguf", weights)
    with pytest.raises(ValueError, match=r"lacks model\.norm\.weight"):
        prepare(model(tmp_path / "fewer.gguf"), tmp_path / "cache", silent)


def test_llama3_rope_is_recovered_from_its_factors(tmp_path: Path) -> None:
    # Of theta 1e6 and 8 dimensions: waves of 6, 199, 6283 and 198692 positions. The last is
    # stretched by the whole factor, the third, between 8192 / 4 and 8192, by a part of it.
    smooth = (8192 / (2 * np.pi * 1000) - 1) / (4 - 1)
    factors = np.array([1, 1, 1 / ((1 - smooth) / 32 + smooth), 32], np.float32)
    for name, stored in (("m", factors), ("odd", factors[::-1].copy())):
        weights = hf_weights() | {"rope_freqs.weight": stored}
        write_gguf(tmp_path / f"{name}.gguf", weights, add_rope_freq_base=1e6)
    assert prepare(model(tmp_path / "m.gguf"), tmp_path / "cache", silent).hf_config["rope_parameters"] == {
        "rope_type": "llama3",
        "rope_theta": 1e6,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    with pytest.raises(ValueError, match="not those of Llama 3"):
        prepare(model(tmp_path / "odd.gguf"), tmp_path / "cache", silent)


def test_rope_scaling_is_kept(tmp_path: Path) -> None:
    scaling = {
        "add_rope_freq_base": 5e5,
        "add_rope_scaling_type": gguf.RopeScalingType.YARN,
        "add_rope_scaling_factor": 4.0,
        "add_rope_scaling_orig_ctx_len": 128,
    }
    write_gguf(tmp_path / "m.gguf", hf_weights(), **scaling)
    rope = prepare(model(tmp_path / "m.gguf"), tmp_path / "cache", silent).hf_config["rope_parameters"]
    expected = {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0}
    assert rope == expected | {"original_max_position_embeddings": 128}


@pytest.mark.parametrize(("words", "tokens"), [("smollm", ["ĠĠ", "1", "2"]), ("qwen2", ["Ġ", "Ġ", "1", "2"])])
def test_a_gguf_names_how_digits_are_cut(tmp_path: Path, words: str, tokens: list[str]) -> None:
    write_gguf(tmp_path / "m.gguf", hf_weights(), add_tokenizer_pre=words)
    file = prepare(model(tmp_path / "m.gguf"), tmp_path / "cache", silent).tokenizer_file
    assert file is not None
    assert Tokenizer.from_file(file).encode("  12", add_special_tokens=False).tokens == tokens


# The cache


def test_an_expansion_is_shared_and_follows_its_file(tmp_path: Path) -> None:
    path, cache = tmp_path / "m.gguf", tmp_path / "cache"
    write_gguf(path, hf_weights())
    phases: list[str] = []
    first = expanded_gguf(path, cache, lambda phase, done, total: phases.append(phase))
    assert list(dict.fromkeys(phases)) == ["Expanding m.gguf", "Writing the expanded m.gguf"]
    phases.clear()
    assert expanded_gguf(path, cache, lambda phase, done, total: phases.append(phase)) == first
    assert phases == []
    write_gguf(path, hf_weights(tied=True))
    assert expanded_gguf(path, cache, silent) != first


def test_what_a_killed_conversion_left_is_removed(tmp_path: Path) -> None:
    path, cache = tmp_path / "m.gguf", tmp_path / "cache"
    write_gguf(path, hf_weights())
    directory = expanded_gguf(path, cache, silent)
    partial = directory.with_name(directory.name + ".partial")
    directory.rename(partial)
    (partial / "leftover").write_text("x")
    assert expanded_gguf(path, cache, silent) == directory
    assert not (directory / "leftover").exists() and not partial.exists()


def _expand_elsewhere(path: Path, cache: Path) -> None:
    expanded_gguf(path, cache, silent)


def test_two_starts_make_one_expansion(tmp_path: Path) -> None:
    path, cache = tmp_path / "m.gguf", tmp_path / "cache"
    write_gguf(path, hf_weights())
    context = multiprocessing.get_context("spawn")
    starts = [context.Process(target=_expand_elsewhere, args=(path, cache)) for _ in range(2)]
    for start in starts:
        start.start()
    for start in starts:
        start.join(DEADLINE_S)
        assert start.exitcode == 0
    made = [entry for entry in (cache / "gguf").iterdir() if entry.is_dir()]
    assert made == [expanded_gguf(path, cache, silent)]


# The process


def run_prepare(config: ModelConfig, cache: Path) -> tuple[int, dict[str, Any]]:
    child = spawn("workers.prepare", PrepareLaunch(config, str(cache), ""), stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    with child.stdin, child.stdout:
        status = child.wait(timeout=DEADLINE_S)
        (line,) = child.stdout.read().splitlines()
    return status, msgspec.json.decode(line)


def test_the_process_answers_with_one_line(tmp_path: Path) -> None:
    write(tmp_path, "config.json", CONFIG)
    status, answer = run_prepare(without_weights(tmp_path), tmp_path)
    assert status == 0
    assert msgspec.convert(answer["checkpoint"], Checkpoint).vocab_size == 300
    assert answer["device"]["cpu_cores"] >= 1
    status, answer = run_prepare(model("no/such/model"), tmp_path)
    assert status == ExitStatus.MODEL
    assert answer.keys() == {"error"} and "\n" not in answer["error"]


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (OSError(errno.ENOSPC, "No space left", "big.bin"), ExitStatus.RESOURCES, r"\(big.bin\): make room"),
        (PermissionError(errno.EACCES, "Permission denied", "w"), ExitStatus.MODEL, "let this user read it"),
        (MemoryError(), ExitStatus.RESOURCES, "MemoryError"),
        (ValueError("has\nlines"), ExitStatus.MODEL, "^has lines$"),
        (KeyError("odd"), ExitStatus.FAILURE, "^cannot prepare here: KeyError: 'odd'$"),
    ],
)
def test_kinds_of_failure(error: Exception, status: ExitStatus, words: str) -> None:
    assert _status(error) is status
    assert re.search(words, _one_line("here", error))


def test_a_directory_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    write(tmp_path, "config.json", CONFIG)
    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    code = (
        "import sys; from pathlib import Path; import workers.prepare as p;"
        f"p.prepare(p.ModelConfig(model={str(tmp_path)!r}, load_dummy=True), Path('unused'), print);"
        "print({'torch', 'transformers', 'numpy', 'zmq'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=DEADLINE_S, check=True
    )
    assert done.stdout == b"set()\n"


def test_progress_reaches_the_supervisor(tmp_path: Path) -> None:
    import zmq

    from atom.messages.codec import Decoder
    from workers.prepare import progress_reports

    endpoint = f"ipc://{tmp_path}/status"
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.bind(endpoint)
        with progress_reports(endpoint) as report:
            report("Converting", 1, 2)
        assert socket.poll(5000)
        assert Decoder[Progress](Progress).decode(socket.recv()) == Progress("prepare", "Converting", 1, 2)


def test_settings_known_as_not_applied_are_never_applied_too() -> None:
    assert not set(hf_directory._NOT_APPLIED) & set(hf_directory._SAMPLING)
