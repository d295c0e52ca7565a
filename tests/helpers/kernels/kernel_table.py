"""The table of docs/develop/rocm-kernels.md: registers and memory of each Triton kernel, by architecture."""

import ast
import importlib
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from atom_ops import triton_impl
from tests.helpers.kernels.chips import CHIPS, Compiled, kernel_name

COMPILED: dict[str, dict[str, list[Compiled]]] = {}
"""Kernel -> architecture -> its variants on default plans; filled by the tests of this run."""

_HEAD = """# Triton kernels on AMD GPUs

`make test-compile ARGS="--table docs/develop/rocm-kernels.md"` writes this page. It compiles every kernel for
these architectures, without a GPU, in the shapes of the models and test cases in `tests/compile`, and with
the plans that the engine takes there by default. It fails if a kernel has no such case, if a program has more
shared memory (LDS) than the GPU, or if a kernel on AMD spills vector registers to memory. Nothing here has
run on AMD hardware.

Each cell has the largest values over all variants: registers of a thread (on AMD of 512, vector and
accumulation registers together), KiB of shared memory (at most {limits}), and in
brackets the number of variants. An empty cell: the kernel is not used there. The plans of `linear` are
measured on the GPU itself; here are those that fit without spilling.

"""


def record(compiled: Sequence[Compiled], chip: str) -> None:
    """Keep them for the table."""
    architecture = CHIPS[chip].architecture
    for each in compiled:
        COMPILED.setdefault(each.kernel, {}).setdefault(architecture, []).append(each)


def launched() -> set[str]:
    """Every kernel that the sources launch, as `kernel[grid](...)`."""
    found = set()
    for each in pkgutil.walk_packages(triton_impl.__path__, f"{triton_impl.__name__}."):
        module = importlib.import_module(each.name)
        assert module.__file__ is not None
        found |= set(_launched(module, ast.parse(Path(module.__file__).read_text(encoding="utf-8"))))
    return found


def _launched(module: ModuleType, tree: ast.Module) -> Iterator[str]:
    """A launched variable stands for every kernel that is assigned to it."""
    from triton.runtime.jit import JITFunction

    launches = [
        node.func.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    ]
    names = {node.id for node in launches if isinstance(node, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and names & set(map(ast.unparse, node.targets)):
            names |= {inner.id for inner in ast.walk(node.value) if isinstance(inner, ast.Name)}
    for name in names:
        kernel = getattr(module, name, None)
        if isinstance(kernel, JITFunction):
            yield kernel_name(kernel)


def table(compiled: Mapping[str, Mapping[str, Sequence[Compiled]]]) -> str:
    """The page."""
    architectures = [chip.architecture for chip in CHIPS.values()]
    limits = ", ".join(f"{chip.architecture} {chip.shared_memory >> 10}" for chip in CHIPS.values())
    lines = [_HEAD.format(limits=limits) + f"| kernel | {' | '.join(architectures)} |"]
    lines.append(f"|---|{'---|' * len(architectures)}")
    for name, variants in sorted(compiled.items()):
        cells = [_cell(variants.get(architecture, ())) for architecture in architectures]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(variants: Sequence[Compiled]) -> str:
    if not variants:
        return ""
    registers = max(each.registers for each in variants)
    shared = round(max(each.shared for each in variants) / 1024, 1)
    spilled = max(each.spilled for each in variants)
    text = f"{registers}, {shared:g} KiB ({len(set(variants))})"
    return f"{text}, spills {spilled} bytes" if spilled else text
