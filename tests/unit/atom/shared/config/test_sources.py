"""Settings from environment variables and files: precedence and errors."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from atom.engine.engine_args import EngineArgs
from atom.shared.config import cli
from atom.shared.config.fields import ConfigError, Field
from atom.shared.config.not_yet import REFUSED
from atom.shared.config.sources import environment_values, file_values, unknown_variables, variable_of
from atom.shared.utils.envs import VARIABLES

FIELDS = cli.all_fields()
SAMPLES: dict[type | str, tuple[str, Any]] = {
    int: ("1024", 1024),
    float: ("0.5", 0.5),
    "spec_decode_acceptance_length": ("1.5", 1.5),
    str: ("text", "text"),
    bool: ("yes", True),
    **dict.fromkeys(("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"), ("3", 3)),
    "cudagraph_capture_sizes": ("[1, 2]", "[1, 2]"),
    "level": ("2", 2),
    "ssl_cert_reqs": ("2", 2),
    "eplb_config": ('{"window_size": 9}', '{"window_size": 9}'),
    "online_quant_config": ('{"global_quant_config": "ptpc_fp8"}', '{"global_quant_config": "ptpc_fp8"}'),
    "override_generation_config": ('{"top_k": 9}', '{"top_k": 9}'),
    "limit_mm_per_prompt": ('{"image": 2}', '{"image": 2}'),
    "kv_transfer_config": ('{"kv_role": "kv_both"}', '{"kv_role": "kv_both"}'),
    "kv_events_config": ('{"publisher": "zmq"}', '{"publisher": "zmq"}'),
    "hf_overrides": ('{"a": {"b": [1]}}', '{"a": {"b": [1]}}'),
}


def given(*args: str, **environ: str) -> argparse.Namespace:
    parser = cli.CommandLineParser(prog="atom-launch")
    cli.add_engine_args(parser)
    cli.add_server_args(parser)
    cli.add_program_args(parser)
    return cli.with_sources(parser.parse_args(args), environ)


def config_file(directory: Path, text: str) -> str:
    path = directory / "atom.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def error_of_file(directory: Path, text: str) -> str:
    path = config_file(directory, text)
    with pytest.raises(ConfigError) as raised:
        file_values(path, FIELDS)
    error = str(raised.value)
    assert path in error and "\n" not in error
    return error.replace(path, "FILE")


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_every_flag_has_a_variable_and_a_key(field: Field, tmp_path: Path) -> None:
    text, value = SAMPLES.get(field.name) or SAMPLES[field.kind]
    if field.choices:
        text = value = field.choices[-1]
    from_variable = given(**{f"ATOM_{field.name.upper()}": text})
    quoted = f"'{text}'" if field.kind is str else text
    path = config_file(tmp_path, f"{field.name.replace('_', '-')}: {quoted}\n")
    for namespace in (from_variable, given("--config", path), given(ATOM_CONFIG=path)):
        assert getattr(namespace, field.name) == value
        assert cli.explicit_fields(namespace) == {field.name}


def test_precedence_of_the_sources(tmp_path: Path) -> None:
    path = config_file(tmp_path, "max_num_seqs: 1\nblock-size: 32\nserver-port: 1\n")
    namespace = given(
        *("--config", path, "--max-num-seqs", "3"), ATOM_MAX_NUM_SEQS="2", ATOM_SERVER_PORT="2", ATOM_HOST=""
    )
    engine, server = cli.engine_config_from(namespace), cli.server_config_from(namespace)
    assert engine.scheduler.max_num_seqs == 3
    assert server.server_port == 2
    assert engine.cache.block_size == 32
    assert server.host == "0.0.0.0"
    assert cli.explicit_fields(namespace) == {"max_num_seqs", "server_port", "block_size"}


def test_a_switch_is_turned_off_by_each_source(tmp_path: Path) -> None:
    assert given(ATOM_ENABLE_PREFIX_CACHING="0").enable_prefix_caching is False
    path = config_file(tmp_path, "enable-prefix-caching: false")
    assert given("--config", path).enable_prefix_caching is False
    assert given("--enable-prefix-caching", "--config", path).enable_prefix_caching is True


@pytest.mark.parametrize(
    ("variable", "text", "words"),
    [
        ("ATOM_MAX_NUM_SEQS", "many", "'many' is not a whole number"),
        ("ATOM_MAX_NUM_SEQS", "0", "at least 1"),
        ("ATOM_LOAD_DUMMY", "maybe", "not a switch: use 1 or 0"),
        ("ATOM_DTYPE", "fp4", "not one of auto"),
        ("ATOM_PIPELINE_PARALLEL_SIZE", "2", "use -tp"),
        ("ATOM_PORT", "tcp://10.0.0.7:80", "Kubernetes sets it for a service"),
    ],
)
def test_errors_name_the_variable(variable: str, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^{variable}: .*{words}"):
        environment_values(FIELDS, {variable: text})


def test_neutral_variables_are_accepted() -> None:
    asked = {"ATOM_ENABLE_CHUNKED_PREFILL": "yes", "ATOM_PIPELINE_PARALLEL_SIZE": "1"}
    assert environment_values(FIELDS, asked) == {}


def test_no_flag_has_the_name_of_another_variable() -> None:
    assert not {variable_of(field.name) for field in FIELDS} & VARIABLES.keys()
    assert not {variable_of(name) for name in REFUSED} & VARIABLES.keys()


def test_unknown_variables_are_reported() -> None:
    environ = {
        "ATOM_MAX_SEQS": "3",
        "ATOM_ZZZZZZZZ": "1",
        "ATOM_EMPTY": "",
        "ATOMIC": "1",
        "PATH": "x",
        "ATOM_MAX_NUM_SEQS": "3",
        "ATOM_DP_SIZE": "1",
        "ATOM_CONFIG": "x",
        "ATOM_LEVEL": "0",
    }
    assert unknown_variables(FIELDS, environ) == [
        "ATOM_MAX_SEQS is set but unknown: did you mean ATOM_MAX_NUM_SEQS?",
        "ATOM_ZZZZZZZZ is set but unknown: no variable has a similar name",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-num-sequences: 3", "FILE: max-num-sequences is not a setting: did you mean max_num_seqs?"),
        ("frobnicate: 3", "FILE: frobnicate is not a setting: see --help"),
        (
            "swap-space: 4",
            "FILE: swap-space is not a setting: it is vLLM's: leave it out, host memory keeps KV",
        ),
        ("ctx_size: 4096", "FILE: ctx_size is not a setting: it is llama.cpp's: use --max-model-len"),
        ("max-num-seqs: many", "FILE: max-num-seqs: 'many' is not a whole number"),
        ("max-num-seqs: 1.5", "FILE: max-num-seqs: 1.5 is not a whole number"),
        ("max-num-seqs: true", "FILE: max-num-seqs: True is not a whole number"),
        ("load-dummy: 1", "FILE: load-dummy: 1 is not a switch"),
        ("load-dummy: 'yes'", "FILE: load-dummy: 'yes' is not a switch"),
        ("served-model-name: 123", "FILE: served-model-name: 123 is not a list of names, such as a,b"),
        ("model: 123", "FILE: model: 123 is not a text; put it in quotes"),
        ("block-size:", "FILE: block-size: None is not a whole number"),
        ("scheduler: {max-num-seqs: 3}", "FILE: scheduler is not a setting"),
        ("dtype: [auto]", "FILE: dtype: ['auto'] is not a text"),
        ("dtype: auto\ndtype: float32", "FILE: dtype is given twice (line 1)"),
        ("block-size: 16\nblock_size: 32", "FILE: block_size is given twice"),
        ("hf-overrides: [1]", "FILE: hf-overrides: [1] is not a JSON object, such as {"),
        ("pipeline-parallel-size: 2", "FILE: pipeline-parallel-size: pipeline parallelism is not supported"),
        ("- max-num-seqs", "FILE: it must contain lines of the form `flag: value`"),
        ("1: 2", "FILE: it must contain lines of the form `flag: value`"),
        ("a: b: c", "FILE: mapping values are not allowed here (line 1)"),
        ("model: !!python/object:os.system x", "FILE: could not determine a constructor"),
    ],
)
def test_errors_name_file_and_key(tmp_path: Path, text: str, words: str) -> None:
    assert error_of_file(tmp_path, text).startswith(words)


def test_neutral_values_in_a_file_are_accepted(tmp_path: Path) -> None:
    text = "# nothing\npipeline_parallel_size: 1\nmax-model-len: null\n"
    assert file_values(config_file(tmp_path, text), FIELDS) == {"max_model_len": None}
    assert file_values(config_file(tmp_path, ""), FIELDS) == {}


def test_a_file_may_spell_overrides_as_an_object(tmp_path: Path) -> None:
    text = "hf-overrides:\n  num_hidden_layers: 2\n  rope_parameters: {factor: 2.0}\n"
    expected = '{"num_hidden_layers": 2, "rope_parameters": {"factor": 2.0}}'
    assert file_values(config_file(tmp_path, text), FIELDS) == {"hf_overrides": expected}


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--config .*none.yaml: No such file"):
        given("--config", str(tmp_path / "none.yaml"))
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"bytes.yaml: the file is not UTF-8 text"):
        given("--config", str(tmp_path / "bytes.yaml"))


def test_scripts_with_engine_flags_read_variables_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_MAX_NUM_SEQS", "7")
    monkeypatch.setenv("ATOM_BLOCK_SIZE", "8")
    monkeypatch.setenv("ATOM_SERVER_PORT", "1")
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser(allow_abbrev=False))
    made = EngineArgs.from_cli_args(parser.parse_args(["--block-size", "32"]))
    assert (made.config.scheduler.max_num_seqs, made.config.cache.block_size) == (7, 32)
    assert made.explicit == {"max_num_seqs", "block_size"}


def test_llm_engine_reads_no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_MAX_NUM_SEQS", "7")
    assert cli.engine_config_from_kwargs().scheduler.max_num_seqs is None
