"""The command line and the keyword arguments."""

import argparse
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from atom.shared.config import cli, not_yet, parser, sources
from atom.shared.config.engine import EngineConfig
from atom.shared.config.fields import ConfigError, fields_of
from atom.shared.config.server import ServerConfig

ALL_FIELDS = [field for concern in (*cli._concerns(), ServerConfig) for field in fields_of(concern)]


def parse(*args: str) -> argparse.Namespace:
    made = cli.CommandLineParser(cli.COMMON_FLAGS, prog="atom-launch", usage="atom-launch [MODEL] [FLAG]...")
    cli.add_engine_args(made)
    cli.add_server_args(made)
    cli.add_program_args(made)
    return made.parse_args(args)


def engine(*args: str) -> EngineConfig:
    return cli.engine_config_from(parse(*args))


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as end:
        parse(*args)
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


@pytest.mark.parametrize("text", ["a,b", " a, b ", '["a", "b"]'])
def test_names_are_separated_by_commas_or_in_a_json_list(text: str) -> None:
    assert cli.server_config_from(parse("--allowed-origins", text)).allowed_origins == "a,b"


@pytest.mark.parametrize("text", ["", "a,,b", "[1]", '["a,b"]', '["a"', "[]", '[""]'])
def test_other_names_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--allowed-origins" in refused(capsys, "--allowed-origins", text)


def test_defaults_are_the_declared_ones() -> None:
    namespace = parse()
    assert cli.engine_config_from(namespace) == EngineConfig()
    assert cli.server_config_from(namespace) == ServerConfig()
    assert cli.explicit_fields(namespace) == set()
    assert namespace.block_size == 16


SAMPLES: dict[type | str, tuple[str, Any]] = {
    int: ("1024", 1024),
    float: ("0.5", 0.5),
    "spec_decode_acceptance_length": ("1.5", 1.5),
    str: ("text", "text"),
    "max_body_bytes": ("2048", 2048),
    **dict.fromkeys(("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"), ("3", 3)),
    "cudagraph_capture_sizes": ("[1, 2]", "[1, 2]"),
    "level": ("2", 2),
    "ssl_cert_reqs": ("2", 2),
    "hf_overrides": ('{"a":{"b":[1]}}', '{"a": {"b": [1]}}'),
    "eplb_config": ('{"window_size":9}', '{"window_size": 9}'),
    "online_quant_config": ('{"global_quant_config":"mxfp4"}', '{"global_quant_config": "mxfp4"}'),
    "override_generation_config": ('{"top_k":9}', '{"top_k": 9}'),
    "limit_mm_per_prompt": ('{"image":2}', '{"image": 2}'),
    "kv_transfer_config": ('{"kv_role":"kv_both"}', '{"kv_role": "kv_both"}'),
    "kv_events_config": ('{"hwm":9}', '{"hwm": 9}'),
}


@pytest.mark.parametrize("field", ALL_FIELDS, ids=lambda field: field.name)
def test_every_field_has_both_spellings(field: Any) -> None:
    dashed, underscored = "--" + field.name.replace("_", "-"), "--" + field.name
    for flag in (dashed, underscored):
        if field.kind is bool:
            assert getattr(parse(flag), field.name) is True
            continue
        text, value = SAMPLES.get(field.name) or SAMPLES[field.kind]
        if field.choices:
            text = value = field.choices[-1]
        namespace = parse(flag, text)
        assert getattr(namespace, field.name) == value
        assert cli.explicit_fields(namespace) == {field.name}


@pytest.mark.parametrize(
    "flag", ["--no-enable-prefix-caching", "--no-enable_prefix_caching", "--no_enable_prefix_caching"]
)
def test_switches_turn_off(flag: str) -> None:
    assert engine(flag).cache.enable_prefix_caching is False
    assert engine(flag, "--enable_prefix_caching").cache.enable_prefix_caching is True


def test_short_name_and_equals_sign() -> None:
    assert engine("-tp", "4").parallel.tensor_parallel_size == 4
    assert engine("--kv_cache_dtype=fp8").cache.kv_cache_dtype == "fp8"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--block-size", "7"], "power of two or a multiple of 16"),
        (["--block-size", "x"], "not a whole number"),
        (["--max-num-seqs", "0"], "at least 1"),
        (["--gpu-memory-utilization", "0"], "more than 0"),
        (["--gpu-memory-utilization", "1.01"], "at most 1"),
        (["--scheduler-delay-factor", "nan"], "not a finite number"),
        (["--server-port", "65536"], "at most 65535"),
        (["--dtype", "fp4"], "not one of auto, bfloat16"),
        (["--cudagraph-mode", "PARTIAL"], "not one of FULL, PIECEWISE, FULL_AND_PIECEWISE"),
        (["--level", "4"], "at most 3"),
        (["--model", ""], "empty"),
        (["--enforce-eager=yes"], "--enforce-eager"),
        (["--hf-overrides", "{'a': 1}"], "is not JSON: Expecting property name"),
        (["--hf-overrides", "[" * 50_000], "is nested too deeply"),
        (["--hf-overrides", "[1]"], "is not a JSON object, such as {"),
        (["--hf-overrides", '{"a": NaN}'], "NaN is not a JSON number"),
        (["--hf-overrides", '{"b": {"a": 1, "a": 2}}'], "a is given twice"),
        (["--bock-size", "16"], "did you mean --block-size?"),
        (["--max-model", "16"], "unknown flag --max-model"),
        (["two", "models"], "unexpected argument 'models': all settings are flags"),
        (["serve", "org/model"], "unexpected argument 'org/model': give the model without 'serve'"),
        (["two", "--model", "models"], "two models are given, 'two' and 'models'"),
        (["--kv-cache-memory-bytes", "4 apples"], "is not a size in bytes, such as 4G"),
    ],
)
def test_errors_are_one_line_that_names_the_flag(
    capsys: pytest.CaptureFixture[str], args: list[str], words: str
) -> None:
    error = refused(capsys, *args)
    assert words in error
    assert not args[0].startswith("-") or args[0].partition("=")[0] in error


@pytest.mark.parametrize("name", not_yet.REFUSED)
def test_known_but_missing_features_are_refused_with_the_reason(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    entry = not_yet.REFUSED[name]
    reason, value = entry.reason, "off" if entry.neutral == "True" else "7"
    assert reason in refused(capsys, "--" + name.replace("_", "-"), value)
    assert reason in refused(capsys, f"--{name}={value}")
    with pytest.raises(ConfigError, match=name):
        cli.engine_config_from_kwargs(**{name: 7})


@pytest.mark.parametrize(
    "args",
    [
        ["-dp", "1"],
        ["--no-trust-remote-code"],
        ["--enable_chunked_prefill"],
        ["--enable-chunked-prefill", "true"],
    ],
)
def test_neutral_values_are_accepted(args: list[str]) -> None:
    assert engine(*args) == EngineConfig()


def test_bare_switches_of_missing_features_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "chunked prefill is always on" in refused(capsys, "--no-enable_chunked_prefill")
    assert "'some/model' is not a switch" in refused(capsys, "--enable-chunked-prefill", "some/model")


def test_a_plain_argument_parser_accepts_the_flags() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--temperature", type=float, default=0.6)
    cli.add_engine_args(parser)
    namespace = parser.parse_args(["--temperature", "0.1", "--max-num-seqs", "3"])
    assert cli.explicit_fields(namespace) == {"max_num_seqs"}
    assert cli.engine_config_from(namespace).scheduler.max_num_seqs == 3


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as end:
        parse(*args)
    assert end.value.code in (None, 0)
    return capsys.readouterr().out


def test_help_begins_with_the_commonest_flags(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "--help").splitlines()
    assert lines[0] == "usage: atom-launch [MODEL] [FLAG]..."
    assert len(lines) <= 24 and max(map(len, lines)) <= 110
    assert all(any(f"{flag} " in line for line in lines) for flag in cli.COMMON_FLAGS)
    assert any("--help all" in line for line in lines) and "scheduler" in lines[-1]


def test_help_shows_each_flag_once(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--help", "all")
    assert "--kv-cache-dtype" in text and "--kv_cache_dtype" not in text
    assert "--enable-ssl-refresh" not in text and "--swap-space" not in text
    for field in ALL_FIELDS:
        assert f"[env: {sources.variable_of(field.name)}]" in " ".join(text.split())


@pytest.mark.parametrize("args", [("--help", "cache"), ("--help=cache",), ("-h", "CACHE")])
def test_help_on_a_group(capsys: pytest.CaptureFixture[str], args: tuple[str, ...]) -> None:
    text = printed(capsys, *args)
    assert text.startswith("cache:\n")
    assert "--block-size" in text and "--max-num-seqs" not in text


def test_help_by_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--help", "port")
    assert "--server-port" in text and "--lenient-fields" not in text  # which has un-supported ones
    assert printed(capsys, "--help=--max_num_seqs").count("--max-num-seqs") == 1
    assert "no flag mentions it; the groups are" in refused(capsys, "--help", "frobnicate")


@pytest.mark.parametrize("shell", parser.SHELLS)
def test_shells_complete_flags_and_choices(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    text = printed(capsys, "--print-completion", shell)
    assert "kv-cache-dtype" in text and "--kv_cache_dtype" not in text
    assert "bfloat16" in text
    assert "enable-ssl-refresh" not in text and "swap-space" not in text


def test_bash_takes_the_completion(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "complete.bash"
    script.write_text(printed(capsys, "--print-completion", "bash"))
    asked = [
        f"source {script}",
        "COMP_WORDS=(atom-launch --kv-cache-dtype f) COMP_CWORD=2",
        r"complete=$(complete -p atom-launch | sed 's/.*-F \([^ ]*\).*/\1/')",
        "$complete atom-launch f --kv-cache-dtype",
        "echo ${COMPREPLY[@]}",
    ]
    done = subprocess.run(["bash", "-c", "; ".join(asked)], capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "fp8", done.stderr


def test_keyword_arguments() -> None:
    config = cli.engine_config_from_kwargs(
        model=Path("some/where"), tensor_parallel_size=2, pipeline_parallel_size=1
    )
    assert config.model.model == "some/where"
    assert config.parallel.tensor_parallel_size == 2
    assert cli.engine_config_from_kwargs(gpu_memory_utilization=1).cache.gpu_memory_utilization == 1.0
    assert cli.engine_config_from_kwargs(max_model_len=None) == EngineConfig()


def test_overrides_may_be_an_object_or_its_text() -> None:
    for given in ({"rope_parameters": {"factor": 2.0}}, '{"rope_parameters":{"factor":2.0}}'):
        config = cli.engine_config_from_kwargs(hf_overrides=given)
        assert config.model.hf_overrides == '{"rope_parameters": {"factor": 2.0}}'
    wrong: list[tuple[Any, str]] = [
        ({"a": {1, 2}}, "cannot be written as JSON"),
        ({"a": float("inf")}, "cannot be written as JSON"),
        ([1], "not a JSON object"),
        ("", "not JSON"),
    ]
    for value, words in wrong:
        with pytest.raises(ConfigError, match=f"hf_overrides: .*{words}"):
            cli.engine_config_from_kwargs(hf_overrides=value)


def test_unknown_keyword_argument_names_itself_and_the_known_ones() -> None:
    with pytest.raises(TypeError, match="'tensor_parallel'.*tensor_parallel_size"):
        cli.engine_config_from_kwargs(tensor_parallel=2)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": True},
        {"max_num_seqs": "3"},
        {"load_dummy": 1},
        {"device": "tpu"},
        {"block_size": None},
    ],
)
def test_keyword_arguments_of_the_wrong_kind_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        cli.engine_config_from_kwargs(**options)


@pytest.mark.parametrize("names", [["a", "b"], ["a,b"], ['["a", "b"]']])
def test_several_names_of_the_model(names: list[str]) -> None:
    assert engine("--served-model-name", *names, "--model", "some/where").model.names == ("a", "b")


@pytest.mark.parametrize(
    "args",
    [
        ["some/where"],
        ["some/where", "--max-num-seqs", "3"],
        ["--max-num-seqs", "3", "some/where"],
        ["--enforce-eager", "some/where"],
        ["--swap-space", "4", "some/where"],
        ["--enable-auto-tool-choice", "some/where"],
    ],
)
def test_the_model_needs_no_flag(args: list[str]) -> None:
    namespace = parse(*args)
    assert cli.engine_config_from(namespace).model.model == "some/where"
    assert "model" in cli.explicit_fields(namespace)


def test_the_model_is_given_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert "two models are given" in refused(capsys, "--model", "a", "b")
    assert engine("--model", "a", "--model", "b").model.model == "b"


def test_another_engines_flag_without_effect_is_noted() -> None:
    namespace = parse("--swap_space", "4", "--enable-auto-tool-choice", "--load-format=auto", "-fa", "on")
    assert cli.explicit_fields(namespace) == set()
    first, second, third, fourth = cli.notes_of(namespace)
    assert first.startswith("--swap_space 4 has no effect, it is a flag of vLLM: host memory keeps KV")
    assert second.startswith("--enable-auto-tool-choice has no effect")
    assert third.startswith("--load-format auto has no effect")
    assert fourth.startswith("-fa on has no effect, it is a flag of llama.cpp")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--quantization", "awq"], "--quantization awq is a flag of vLLM: .*--online-quant-config"),
        (["-q", "fp8"], "-q fp8 is a flag of vLLM"),
        (["--load-format", "dummy"], "--load-dummy"),
        (["--speculative-config={}"], "--method"),
        (["-m", "model.gguf"], "-m model.gguf is a flag of llama.cpp: use --model"),
        (["-hf", "owner/name"], "-hf owner/name is a flag of llama.cpp"),
        (["-t", "8"], "-t 8 is a flag of llama.cpp: use --cpu-threads"),
        (["-n", "-1"], "-n .*is a flag of llama.cpp: use --default-max-tokens"),
        (["-c", "4096"], "use --max-model-len"),
    ],
)
def test_another_engines_flag_names_ours(
    capsys: pytest.CaptureFixture[str], args: list[str], words: str
) -> None:
    assert re.search(words, refused(capsys, *args))


def test_another_engines_setting_is_named_for_the_library_too() -> None:
    with pytest.raises(TypeError, match="'swap_space'; it is vLLM's: leave it out, host memory keeps KV"):
        cli.engine_config_from_kwargs(swap_space=4)


@pytest.mark.parametrize(
    ("args", "http", "internal"),
    [
        (["--port", "9000"], 9000, None),
        (["--port", "9000", "--server-port", "80"], 80, 9000),
        (["--port", "9000", "--nnodes", "2"], 8000, 9000),
        ([], 8000, None),
    ],
)
def test_port_alone_is_the_http_port_of_one_node(args: list[str], http: int, internal: int | None) -> None:
    namespace = cli.with_http_port(parse(*args))
    assert cli.server_config_from(namespace).server_port == http
    assert cli.engine_config_from(namespace).parallel.port == internal
    changed = args == ["--port", "9000"]
    assert ("server_port" in cli.explicit_fields(namespace)) == (changed or "--server-port" in args)
    assert any("--server-port" in note for note in cli.notes_of(namespace)) == changed


def test_sizes_have_units() -> None:
    assert engine("--kv-cache-memory-bytes", "4G").cache.kv_cache_memory_bytes == 4 << 30
    config = cli.engine_config_from_kwargs(kv_cache_memory_bytes="512M")
    assert config.cache.kv_cache_memory_bytes == 512 << 20
    assert cli.server_config_from(parse("--max-body-bytes", "1.5MiB")).max_body_bytes == 3 << 19
