"""From --model to a Checkpoint: directories, the process that reads them, and what is refused."""

import errno
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.model import ModelConfig
from atom.shared.messages.launch import PrepareLaunch
from atom.shared.messages.supervisor import Progress
from atom.shared.utils.exit_status import ExitStatus
from atom.shared.utils.process import spawn
from workers.checkpoint import hf_directory
from workers.checkpoint import prepare as prepare_module
from workers.checkpoint.prepare import _reason, _status, prepare
from workers.checkpoint.quantization_files import stated_quantization

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
    """Ignores progress."""


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
            {"original_max_position_embeddings": 1024, "rope_scaling": {"type": "su"}},
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


def test_rope_of_each_type_of_layer_is_completed(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 3.0}
    both = {"full_attention": yarn, "sliding_attention": {"rope_theta": 2.0}}
    checkpoint = checkpoint_of(tmp_path, {"rope_parameters": both})
    assert checkpoint.hf_config["rope_parameters"] == {
        "full_attention": yarn | {"original_max_position_embeddings": 2048},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2.0},
    }
    assert checkpoint.max_model_len == 2048
    with pytest.raises(ValueError, match="both common rope_parameters and some by layer type"):
        checkpoint_of(tmp_path / "mixed", {"rope_parameters": both | {"rope_theta": 2.0}})
    with pytest.raises(ValueError, match="factor must be a number above 0"):
        checkpoint_of(tmp_path / "wrong", {"rope_parameters": {"full_attention": {"factor": -1}}})


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


@pytest.mark.parametrize("do_sample", [{}, {"do_sample": False}, {"do_sample": True}])
def test_sampling_defaults_apply_without_do_sample(tmp_path: Path, do_sample: dict[str, bool]) -> None:
    generation = {"temperature": 0.6, "eos_token_id": 0} | do_sample
    checkpoint = checkpoint_of(tmp_path, generation_config=generation)
    assert checkpoint.default_sampling == {"temperature": 0.6}
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
        tokenizer={
            "post_processor": processor,
            "added_tokens": [{"id": 1, "content": "<s>", "special": True, "normalized": False}],
        },
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


def test_code_of_a_tokenizer_is_never_run(tmp_path: Path) -> None:
    """transformers would ask on the terminal, or run it."""
    (tmp_path / "own.py").write_text("from pathlib import Path\nPath(__file__ + '.ran').touch()\n")
    write(tmp_path, "vocab.txt", "a")
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    with pytest.raises(ValueError, match=r"no tokenizer.json, and its vocab.txt cannot be converted"):
        checkpoint_of(tmp_path, tokenizer_config=own)
    assert not list(tmp_path.glob("*.ran"))


def test_packed_experts_of_gpt_oss_are_kept_by_the_name_of_their_form(tmp_path: Path) -> None:
    """As published: no dtype is named, and bytes say nothing about it."""
    packed = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config = {"model_type": "gpt_oss", "dtype": None, "quantization_config": packed}
    blocks = np.zeros((2, 64, 2, 16), np.uint8)
    save_file({"a.blocks": blocks, "b.weight": np.zeros((4, 4), np.float16)}, tmp_path / "model.safetensors")
    read = hf_directory.normalised_config(CONFIG | config, tmp_path)
    assert read["quantization_config"] == packed
    assert read["dtype"] == "float16"
    other = config | {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}
    with pytest.raises(ValueError, match=r"quantized \(fp8\) with fmt 'e5m2'"):
        hf_directory.normalised_config(CONFIG | other, tmp_path)


GPTQ = {"bits": 4, "group_size": 128, "desc_act": False, "sym": True}
MODELOPT = {
    "producer": {"name": "modelopt"},
    "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
}


def test_the_quantization_may_be_stated_in_other_places(tmp_path: Path) -> None:
    def stated(config: dict[str, Any]) -> Any:
        return stated_quantization(config, tmp_path)

    assert stated({"quantization_config": None}) is None
    assert stated({"compression_config": GPTQ}) == GPTQ
    write(tmp_path, "quantize_config.json", GPTQ)
    assert stated({}) == GPTQ | {"quant_method": "gptq"}
    write(tmp_path, "quantize_config.json", {"w_bit": 4, "version": "gemm"})
    assert stated({})["quant_method"] == "awq"
    write(tmp_path, "hf_quant_config.json", MODELOPT)
    modelopt = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    assert stated({}) == modelopt
    assert stated({"quantization_config": {"quant_method": "modelopt"}}) == modelopt
    with pytest.raises(
        ValueError, match=r"quant_algo NVFP4 in config\.json and FP8 in hf_quant_config\.json"
    ):
        stated({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}})
    read = hf_directory.normalised_config(CONFIG, tmp_path)
    assert read["quantization_config"] == modelopt
    write(
        tmp_path, "hf_quant_config.json", {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    )
    both = stated({})
    assert (both["quant_method"], both["kv_cache_quant_algo"]) == ("awq", "FP8")
    (tmp_path / "quantize_config.json").unlink()
    cache = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    assert stated({}) == cache and stated({"quantization_config": cache}) == cache


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": []}, "names no architecture"),
        ({"quantization_config": {"quant_method": "aqlm"}}, r"quantized \(aqlm\)"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, r"quantized \(mxfp4\)"),
        ({"vocab_size": None}, r"config\.json has no vocab_size"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn, which is not supported"),
    ],
)
def test_configurations_that_cannot_run_are_refused(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        checkpoint_of(tmp_path, config)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(
    ("stated", "flag", "dtype"),
    [
        ("auto", "auto", "float16"),  # that of the weights
        (None, "bfloat16", "float16"),
        ("float64", "bfloat16", "bfloat16"),
        ("torch.float64", "float32", "float32"),
    ],
)
def test_a_dtype_that_cannot_be_used(
    tmp_path: Path, name: str, stated: str | None, flag: Any, dtype: str
) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "dtype"} | {name: stated}
    write(tmp_path, "config.json", config)
    save_file({"a": np.zeros((2, 2), np.float16)}, tmp_path / "model.safetensors")
    found = prepare(ModelConfig(model=str(tmp_path), dtype=flag), tmp_path / "cache", silent)
    assert found.dtype == found.hf_config["dtype"] == dtype
    if stated not in ("auto", None):
        with pytest.raises(ValueError, match="has dtype float64, which is not supported: choose one of"):
            prepare(model(tmp_path), tmp_path / "cache", silent)


def test_broken_json_is_named(tmp_path: Path) -> None:
    write(tmp_path, "config.json", "{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        prepare(without_weights(tmp_path), tmp_path, silent)


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, "weights.bin", "x")
    for path, words in (
        ("./no/such/place", r"no such path; give .* a name on the hub"),
        (str(tmp_path / "weights.bin"), r"not a \.gguf file"),
        (str(tmp_path), "has no config.json: give"),
    ):
        with pytest.raises(ValueError, match=words):
            prepare(model(path), tmp_path, silent)
    write(tmp_path, "a.gguf", "x")
    for path in (tmp_path, tmp_path / "a.gguf"):
        with pytest.raises(ValueError, match=r"a\.gguf is not a readable GGUF file"):
            prepare(model(path), tmp_path, silent)
    write(tmp_path, "b-00002-of-00002.gguf", "x")
    with pytest.raises(ValueError, match=r"2 models in GGUF files: give one of them, such as .*/a\.gguf"):
        prepare(model(tmp_path), tmp_path, silent)


# The process


def run_prepare(config: ModelConfig, cache: Path) -> tuple[int, dict[str, Any]]:
    child = spawn("workers.checkpoint.prepare", PrepareLaunch(config, str(cache), ""), stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    with child.stdin, child.stdout:
        status = child.wait(timeout=DEADLINE_S)
        (line,) = child.stdout.read().splitlines()
    return status, msgspec.json.decode(line)


def test_the_process_prints_one_line(tmp_path: Path) -> None:
    write(tmp_path, "config.json", CONFIG)
    status, response = run_prepare(without_weights(tmp_path), tmp_path)
    assert status == 0
    assert msgspec.convert(response["checkpoint"], Checkpoint).vocab_size == 300
    assert response["device"]["cpu_cores"] >= 1
    status, response = run_prepare(model("no/such/model"), tmp_path)
    assert status == ExitStatus.MODEL
    assert response.keys() == {"error"} and "\n" not in response["error"]


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "w"), ExitStatus.MODEL, "give this user"),
        (MemoryError(), ExitStatus.RESOURCES, "MemoryError"),
        (ValueError("has\nlines"), ExitStatus.MODEL, "^has lines$"),
        (KeyError("odd"), ExitStatus.FAILURE, "^cannot prepare here: KeyError: 'odd'$"),
    ],
)
def test_kinds_of_failure(error: Exception, status: ExitStatus, words: str) -> None:
    assert _status(error) is status
    assert re.search(words, _reason("here", error))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "big.bin"), r"the disk \(big.bin\): free some"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "the disk: free some"),
        (SafetensorError("Error: I/O error: No space left on device (os error 28)"), "the disk: free some"),
    ],
)
def test_a_full_disk_names_the_cache_and_what_moves_it(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(prepare_module, "prepare", fail)
    for name, hint in ((str(tmp_path), False), ("owner/name", True)):
        launch = PrepareLaunch(ModelConfig(model=name), str(tmp_path / "cache"), "")
        monkeypatch.setattr(prepare_module, "read_launch", lambda kind, launch=launch: launch)
        line = io.StringIO()
        monkeypatch.setattr(sys, "stdout", line)
        with pytest.raises(SystemExit) as end:
            prepare_module.main()
        assert end.value.code == ExitStatus.RESOURCES
        text = json.loads(line.getvalue())["error"]
        assert re.search(words, text) and f"ATOM_CACHE_DIR ({tmp_path / 'cache'})" in text
        assert ("--download-dir" in text) == hint


def test_a_directory_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    write(tmp_path, "config.json", CONFIG)
    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    code = (
        "import sys; from pathlib import Path; import workers.checkpoint.prepare as p;"
        f"p.prepare(p.ModelConfig(model={str(tmp_path)!r}, load_dummy=True), Path('unused'), print);"
        "print({'torch', 'transformers', 'numpy', 'zmq'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=DEADLINE_S, check=True
    )
    assert done.stdout == b"set()\n"


def test_progress_reaches_the_supervisor(tmp_path: Path) -> None:
    import zmq

    from atom.shared.messages.codec import Decoder
    from workers.checkpoint.prepare import progress_reports

    endpoint = f"ipc://{tmp_path}/status"
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.bind(endpoint)
        with progress_reports(endpoint) as report:
            report("Converting", 1, 2)
        assert socket.poll(60_000)
        assert Decoder[Progress](Progress).decode(socket.recv()) == Progress("prepare", "Converting", 1, 2)


def test_settings_known_as_not_applied_are_never_applied_too() -> None:
    assert not set(hf_directory._NOT_APPLIED) & set(hf_directory._SAMPLING)


def test_quantized_modules_of_a_language_model_have_its_names(tmp_path: Path) -> None:
    stated = {
        "quant_method": "fp8",
        "ignore": ["language_model.lm_head", "re:model.language_model.layers.0.*", 3],
        "groups": {"language_model.model.layers.1.mlp": {"bits": 8}},
    }
    assert stated_quantization({"quantization_config": stated}, tmp_path) == {
        "quant_method": "fp8",
        "ignore": ["lm_head", "re:model.layers.0.*", 3],
        "groups": {"model.layers.1.mlp": {"bits": 8}},
    }
