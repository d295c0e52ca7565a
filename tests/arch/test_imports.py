"""Imports point one way, every module can come first, and the torch-free parts are."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path

import pytest

from tests.helpers.source import ROOT, module_name, package_files, parse

DEADLINE_S = 280
pytestmark = pytest.mark.timeout(DEADLINE_S + 20)

TORCH_FREE = ("frontend", "engine_core", "atom.shared", "atom.launch", "atom.engine")
HEAVY = ("torch", "transformers", "numpy")

# Loads what others wrote once, then imports each module in a fork that has none of ours but the packages
# in which it lies: Python would import those first as well, so that it is as good as a new interpreter.
IMPORT_EACH_FIRST = """
import importlib, json, os, sys, traceback
import torch, numpy, transformers, zmq.asyncio, aiohttp.web, msgspec, tokenizers
import jinja2, yaml, xxhash, prometheus_client, statistics, secrets
listed, failed = os.pipe()
within = json.loads(sys.stdin.read())
def import_each(names):
    for name in names:
        child = os.fork()
        if child == 0:
            try:
                importlib.import_module(name)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            import_each(within.get(name, ()))
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            os.write(failed, name.encode() + b"\\n")
import_each(within[""])
os.close(failed)
print(json.dumps(os.fdopen(listed).read().split()))
"""

IMPORT_AND_LIST = """
import importlib, json, sys
for name in json.loads(sys.stdin.read()):
    importlib.import_module(name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def run(code: str, modules: object) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(modules),
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        timeout=DEADLINE_S,
        check=True,
    )
    found: list[str] = json.loads(done.stdout)
    return found


def modules() -> dict[str, Path]:
    """The files of the modules that can be imported here."""
    found = {module_name(path): path for path in package_files()}
    absent = ["dynamo", "atom.integrations.dynamo.worker"], ["triton", "atom_ops.triton_impl."]
    left_out = tuple(name for package, name in absent if find_spec(package) is None)
    for host in ("vllm", "sglang"):
        if find_spec(host) is None:
            hosted = f"atom.plugin.{host}."
            alone = tuple(hosted + name for name in ("host_version", "registration", "step_plan"))
            left_out += tuple(name for name in found if name.startswith(hosted) and name not in alone)
    return {name: path for name, path in found.items() if not name.startswith(left_out)}


def packages_of(name: str) -> list[str]:
    """The name and those of the packages in which it lies, the outermost first."""
    return list(accumulate(name.split("."), "{}.{}".format))


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those that an import executes: of functions there are none."""
    for statement in body:
        yield statement
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            for block in ("body", "orelse", "finalbody", "handlers", "cases"):
                yield from statements(getattr(statement, block, []))


def imports(path: Path) -> set[str]:
    """Dotted names that the file may import while it is imported itself, attributes of modules included."""
    found = set()
    for statement in statements(parse(path).body):
        match statement:
            case ast.Import(names=names):
                found |= {each.name for each in names}
            case ast.ImportFrom(module=str(module), names=names, level=0):
                found |= {module, *(f"{module}.{each.name}" for each in names)}
            case ast.ImportFrom():
                raise AssertionError(f"{path}:{statement.lineno} imports by a relative name")
    return found


def in_cycles(graph: dict[str, set[str]]) -> list[str]:
    """The nodes that can be reached from themselves."""

    def reached(node: str) -> set[str]:
        found, new = set[str](), graph[node]
        while new:
            found |= new
            new = set[str]().union(*(graph[each] for each in new)) - found
        return found

    return [node for node in graph if node in reached(node)]


def test_cycles_are_found() -> None:
    assert in_cycles({"a": {"b"}, "b": {"c", "d"}, "c": {"b"}, "d": set()}) == ["b", "c"]


def test_every_module_can_be_imported_first() -> None:
    """Only where imports form a cycle can it matter which of its modules comes first."""
    files = modules()
    loads = {
        name: {each for found in {name, *imports(path)} for each in packages_of(found) if each in files}
        for name, path in files.items()
    }
    cyclic = in_cycles({name: found - {name} for name, found in loads.items()})
    assert "atom_ops" in cyclic, "a package that imports its modules is in a cycle with them"
    within: dict[str, list[str]] = {"": []}
    for name in cyclic:
        (*_, package) = ["", *(each for each in packages_of(name)[:-1] if each in cyclic)]
        within.setdefault(package, []).append(name)
    assert run(IMPORT_EACH_FIRST, within) == []


def test_every_module_can_be_imported() -> None:
    assert "atom_ops" in run(IMPORT_AND_LIST, list(modules()))


def test_torch_free_parts_do_not_load_torch() -> None:
    names = [module_name(path) for path in package_files()]
    free = [name for name in names if name.startswith(TORCH_FREE)]
    assert {".".join(name.split(".")[: each.count(".") + 1]) for each in TORCH_FREE for name in free} >= set(
        TORCH_FREE
    )
    assert not set(HEAVY) & set(run(IMPORT_AND_LIST, free))


def test_import_contracts() -> None:
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(cache_dir=None))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stdout
