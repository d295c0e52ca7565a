"""Memory that kernels keep between launches comes from `kept`, which works in a capture that never runs."""

import ast
from pathlib import Path

from tests.helpers.source import package_files, parse

KERNELS = Path("atom_ops/triton_impl")
KEPT = KERNELS / "hardware/device_state.py"


def cached_tensors(path: Path) -> list[str]:
    """Functions whose result is kept, and is a tensor."""
    found = []
    for node in ast.walk(parse(path)):
        if (
            isinstance(node, ast.FunctionDef)
            and node.returns is not None
            and "Tensor" in ast.unparse(node.returns)
        ):
            decorators = {ast.unparse(each).split("(")[0].rpartition(".")[2] for each in node.decorator_list}
            if decorators & {"cache", "lru_cache", "cached_property"}:
                found.append(f"{path}: {node.name}")
    return found


def test_no_kernel_keeps_tensors_of_its_own() -> None:
    files = [path for path in package_files() if KERNELS in path.parents]
    assert cached_tensors(KEPT) == [f"{KEPT}: kept"]
    assert [name for path in files if path != KEPT for name in cached_tensors(path)] == []
