"""What the tables of other engines' flags say is true of ours."""

import re

import pytest

from atom.shared.config.cli import (
    CommandLineParser,
    add_engine_args,
    add_program_args,
    all_fields,
    flags_of,
    notes_of,
)
from atom.shared.config.not_yet import REFUSED
from atom.shared.config.other_engines import LLAMA_CPP, SAME, VLLM, OtherFlag, Takes, other_flags
from atom.shared.utils.envs import VARIABLES

OURS = {flag for field in all_fields() for flag in flags_of(field)} | {"--config", "--plan"}
NAMED = re.compile(r"(?<![\w-])--?[a-z][a-z0-9-]*")


@pytest.fixture(scope="module")
def parser() -> CommandLineParser:
    made = CommandLineParser()
    add_engine_args(made)
    add_program_args(made)
    return made


def test_flags_that_are_the_same_exist() -> None:
    assert set(SAME) - OURS == set()


@pytest.mark.parametrize("flag", [*VLLM, *LLAMA_CPP], ids=lambda flag: flag.spellings)
def test_every_flag_that_the_advice_names_exists(flag: OtherFlag) -> None:
    assert set(NAMED.findall(flag.advice)) - OURS == set()
    variables = set(re.findall(r"ATOM_[A-Z_]+", flag.advice))
    assert variables <= {*VARIABLES, "ATOM_API_KEY"}


@pytest.mark.parametrize("engine", [VLLM, LLAMA_CPP])
def test_no_flag_is_listed_twice(engine: tuple[OtherFlag, ...]) -> None:
    names = [name for flag in engine for name in flag.names]
    assert sorted(set(names)) == sorted(names)


def test_short_flags_are_not_ours() -> None:
    """A name that both have means ours."""
    known_to_refuse = {"--" + name.replace("_", "-") for name in REFUSED}
    shared = set(other_flags()) & (OURS | known_to_refuse)
    assert shared <= {
        "--port",
        "-pp",
        "--pipeline-parallel-size",
        "--enable-chunked-prefill",
    }


@pytest.mark.parametrize("name", sorted(other_flags().keys() - {"--port"}))
def test_each_is_accepted_or_refused_as_the_table_says(
    name: str, parser: CommandLineParser, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, flag = other_flags()[name]
    value = [] if flag.accepted is Takes.NOTHING else [flag.values[0] if flag.values else "9"]
    if flag.accepted is not None:
        namespace = parser.parse_args(["some/model", name, *value])
        assert namespace.model == "some/model"
        assert notes_of(namespace) or name.strip("-").replace("-", "_") in {*REFUSED, "pp"}
    if flag.accepted is None or flag.values:
        with pytest.raises(SystemExit):
            parser.parse_args([name, "something-else"])
        error = capsys.readouterr().err
        assert f"is a flag of {engine}: {flag.advice}" in error or "not supported yet" in error


def test_a_program_with_its_own_flags_has_only_the_engines() -> None:
    """`--temperature` is an example's own flag, and llama.cpp's."""
    parser = CommandLineParser()
    parser.add_argument("--temperature", type=float)
    assert parser.parse_args(["--temperature", "0.5"]).temperature == 0.5
