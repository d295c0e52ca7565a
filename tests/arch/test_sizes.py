"""Small files, small functions, short parameter lists, one value a line."""

import ast
import statistics
from collections import Counter
from functools import cache
from pathlib import Path

from tests.helpers.source import all_files, package_files, parse, text_of

MAX_FILE, MAX_MODEL_FILE = 600, 700
MAX_FUNCTION, MAX_INIT, MAX_PARAMETERS = 80, 50, 8
MAX_P90_FUNCTION = 35
MAX_TUPLE_ASSIGNMENTS = 5.0
"""Most assignments such as `a, b = x(), y()` in 1,000 lines of a top-level package."""

# "path::function" or "path": may only shrink.
ALLOWED: frozenset[str] = frozenset()

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def functions() -> list[tuple[Path, Function]]:
    return [
        (path, node)
        for path in package_files()
        for node in ast.walk(parse(path))
        if isinstance(node, Function)
    ]


def length(function: Function) -> int:
    assert function.end_lineno is not None
    return function.end_lineno - function.lineno + 1


def test_files() -> None:
    too_long = []
    for path in all_files():
        limit = MAX_MODEL_FILE if path.is_relative_to("workers/models") else MAX_FILE
        lines = text_of(path).count("\n")
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


def is_tuple_assignment(node: ast.AST) -> bool:
    """Whether `node` is of the form `a, b = x(), y()`, and not a swap."""
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
            swapped = all(isinstance(value, ast.Name) for value in values)
            return not (swapped and set(map(ast.unparse, names)) & set(map(ast.unparse, values)))
    return False


def test_unrelated_values_have_lines_of_their_own() -> None:
    assignments: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for path in package_files():
        lines[path.parts[0]] += text_of(path).count("\n")
        assignments[path.parts[0]] += sum(map(is_tuple_assignment, ast.walk(parse(path))))
    rates = {package: round(1000 * assignments[package] / lines[package], 1) for package in lines}
    assert max(rates.values()) <= MAX_TUPLE_ASSIGNMENTS, rates
