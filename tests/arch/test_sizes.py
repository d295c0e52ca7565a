"""Small files, small functions, short parameter lists."""

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.source import ROOT, all_files, package_files, parse

MAX_FILE, MAX_MODEL_FILE = 600, 700
MAX_FUNCTION, MAX_INIT, MAX_PARAMETERS = 80, 50, 8
MAX_P90_FUNCTION = 35

# "path::function" or "path": may only shrink.
ALLOWED: frozenset[str] = frozenset()

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions() -> Iterator[tuple[Path, Function]]:
    for path in package_files():
        for node in ast.walk(parse(path)):
            if isinstance(node, Function):
                yield path, node


def length(function: Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def test_files() -> None:
    too_long = []
    for path in all_files():
        limit = MAX_MODEL_FILE if path.is_relative_to("workers/models") else MAX_FILE
        lines = (ROOT / path).read_text(encoding="utf-8").count("\n")
        if lines > limit and str(path) not in ALLOWED:
            too_long.append(f"{path}: {lines} lines, limit {limit}")
    assert not too_long


def test_functions() -> None:
    too_long = []
    for path, function in functions():
        limit = MAX_INIT if function.name == "__init__" else MAX_FUNCTION
        if length(function) > limit and f"{path}::{function.name}" not in ALLOWED:
            too_long.append(
                f"{path}:{function.lineno} {function.name}: {length(function)} lines, limit {limit}"
            )
    assert not too_long


def test_most_functions_are_short() -> None:
    lengths = [length(function) for _, function in functions()]
    assert statistics.quantiles(lengths, n=10)[-1] <= MAX_P90_FUNCTION


def test_parameters() -> None:
    too_many = []
    for path, function in functions():
        if path.is_relative_to("atom_ops"):  # an operation takes what it computes with
            continue
        arguments = function.args
        names = [argument.arg for argument in arguments.posonlyargs + arguments.args + arguments.kwonlyargs]
        count = len([name for name in names if name not in ("self", "cls")])
        if count > MAX_PARAMETERS and f"{path}::{function.name}" not in ALLOWED:
            too_many.append(f"{path}:{function.lineno} {function.name}: {count} parameters")
    assert not too_many


def test_the_allow_list_holds_nothing_that_is_gone() -> None:
    known = {str(path) for path in all_files()} | {f"{path}::{node.name}" for path, node in functions()}
    assert known >= ALLOWED
