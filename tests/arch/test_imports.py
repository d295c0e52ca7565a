"""Imports point one way, every module can come first, and the torch-free parts are."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.helpers.source import ROOT, module_name, package_files

DEADLINE_S = 280
pytestmark = pytest.mark.timeout(DEADLINE_S + 20)

TORCH_FREE = ("frontend", "engine_core", "atom.shared", "atom.launch", "atom.engine")
HEAVY = ("torch", "transformers", "numpy")

# Loads what others wrote once, then imports each of our modules in a fork that has none of ours:
# as good as a new interpreter for finding cycles, and much faster once torch is loaded.
IMPORT_EACH_ALONE = """
import importlib, json, os, sys, traceback
import torch, numpy, transformers, zmq.asyncio, aiohttp.web, msgspec, tokenizers
import jinja2, yaml, xxhash, prometheus_client, statistics, secrets
failed = []
for name in json.loads(sys.stdin.read()):
    child = os.fork()
    if child == 0:
        try:
            importlib.import_module(name)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
print(json.dumps(failed))
"""

IMPORT_AND_LIST = """
import importlib, json, sys
for name in json.loads(sys.stdin.read()):
    importlib.import_module(name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def run(code: str, modules: list[str]) -> list[str]:
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


@pytest.mark.parametrize(
    "quarter", [0, *(pytest.param(other, marks=pytest.mark.slow) for other in (1, 2, 3))]
)
def test_every_module_can_be_imported_first(quarter: int) -> None:
    names = [module_name(path) for path in package_files()]
    if find_spec("triton") is None:
        names = [name for name in names if not name.startswith("atom_ops.triton_impl.")]
    if find_spec("dynamo") is None:
        names.remove("atom.integrations.dynamo.worker")
    for host in ("vllm", "sglang"):
        if find_spec(host) is None:
            hosted = f"atom.plugin.{host}."
            alone = tuple(hosted + name for name in ("host_version", "registration", "step_plan"))
            names = [name for name in names if not name.startswith(hosted) or name in alone]
    assert run(IMPORT_EACH_ALONE, names[quarter::4]) == []


def test_torch_free_parts_do_not_load_torch() -> None:
    names = [module_name(path) for path in package_files()]
    modules = [name for name in names if name.startswith(TORCH_FREE)]
    assert {
        ".".join(name.split(".")[: each.count(".") + 1]) for each in TORCH_FREE for name in modules
    } >= set(TORCH_FREE)
    assert not set(HEAVY) & set(run(IMPORT_AND_LIST, modules))


def test_import_contracts() -> None:
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(cache_dir=None))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stdout
