"""Nothing that a peer sends may become code: no pickle, no eval, nowhere."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.helpers.source import package_files, text_of

MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
FUNCTIONS = {"eval", "exec", "compile"}
METHODS = {
    *("send_pyobj", "recv_pyobj"),
    # these collectives of torch pickle what they carry
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
    *("send_object_list", "recv_object_list"),
}
WORDS = re.compile(
    rf"\b(?:{'|'.join(MODULES | METHODS)}|torch\.load)\b|(?<![.\w])(?:{'|'.join(FUNCTIONS)})\("
)
"""What a source with an offence has in it: others need not be parsed."""


def offences(source: str) -> Iterator[str]:
    if not WORDS.search(source):
        return
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (f"import {name.name}" for name in names if name.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in MODULES:
                yield f"from {module} import"
            case ast.Call(func=ast.Name(id=name)) if name in FUNCTIONS:
                yield f"{name}()"
            case ast.Attribute(attr=name) if name in METHODS:
                yield f".{name}"
            case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
                yield "torch.load"


def test_no_message_can_carry_code() -> None:
    found = [f"{path}: {each}" for path in package_files() for each in offences(text_of(path))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code", ["import pickle", "from pickle import loads", "eval('1')", "torch.load(f)", "s.recv_pyobj()"]
)
def test_the_search_finds_them(code: str) -> None:
    assert list(offences(code))
