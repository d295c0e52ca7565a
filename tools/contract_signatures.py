"""Reads the signatures of what we use of AITER and MORI from their published wheels.

python -m tools.contract_signatures

Downloads the wheels (pip, without their dependencies), reads their Python sources without importing them,
and writes tests/arch/signatures.json: names, parameters and versions, which tests/arch/test_contracts.py
holds our calls against.
"""

import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tools.library_calls import LIBRARIES, package_uses

PACKAGES = ("atom", "frontend", "engine_core", "workers", "parallel", "atom_ops")
SIGNATURES = Path("tests/arch/signatures.json")
UNPUBLISHED = ("aiter.register_input_buffer",)
"""Called in AITER's next release alone, of which there is no wheel."""
# Wheels for several systems; MORI has some for CPython 3.10 and 3.12 alone.
_PLATFORMS = ("manylinux_2_39_x86_64", "manylinux_2_35_x86_64", "manylinux_2_28_x86_64", "linux_x86_64")
_CONSTANT = "constant"


def main() -> None:
    names = sorted({use.name for use in package_uses(our_files())})
    written = {}
    with tempfile.TemporaryDirectory() as directory:
        for library, distribution in LIBRARIES.items():
            used = [name for name in names if name.split(".")[0] == library]
            if used:
                wheel = download(distribution, Path(directory))
                sources = _unpacked(wheel, Path(directory) / library)
                version = wheel.name.split("-")[1]
                found = {name: signature(sources, name) for name in used if name not in UNPUBLISHED}
                written[distribution] = {"version": version, "names": found}
    SIGNATURES.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def our_files() -> list[Path]:
    """The files of our packages, below the working directory."""
    return [path for package in PACKAGES for path in sorted(Path(package).rglob("*.py"))]


def download(distribution: str, directory: Path) -> Path:
    """The newest wheel of a distribution. Raises subprocess.CalledProcessError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--pre", "--no-deps", distribution]
    command += ["--python-version", "3.12", "--only-binary=:all:", "--dest", str(directory / "wheels")]
    for platform in _PLATFORMS:
        command += ["--platform", platform]
    subprocess.run(command, check=True, timeout=600)
    (wheel,) = (directory / "wheels").glob(f"{distribution.replace('-', '_')}-*.whl")
    return wheel


def _unpacked(wheel: Path, directory: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory, [name for name in archive.namelist() if name.endswith(".py")])
    return directory


def signature(sources: Path, name: str) -> str:
    """The parameters of a function, method or class, as in `(x, y=..., *, z)`; or that it is a constant.

    Raises ValueError for a name that the sources do not have.
    """
    module, rest = _module(sources, name)
    if not rest:
        raise ValueError(f"{name} is a module: use what is in it by its full name")
    node, home = _definition(sources, module, rest[0])
    for part in rest[1:]:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):  # an object made by its class
            if ast.unparse(node.value.func) == "type":
                return _CONSTANT  # of an enumeration in C++
            node, home = _definition(sources, home, ast.unparse(node.value.func))
        if not isinstance(node, ast.ClassDef):
            raise ValueError(f"{name}: {ast.unparse(node)[:60]} has no attributes")
        inner = _member(node, part)
        if inner is None and f"{node.name}.{part}" in home.read_text(encoding="utf-8"):
            return _CONSTANT  # of an enumeration in C++
        if inner is None:
            raise ValueError(f"{name}: the class has no {part}")
        node = inner
    return _parameters(node)


def _module(sources: Path, name: str) -> tuple[Path, list[str]]:
    """The file of the longest module in a dotted name, and what follows it."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        path = sources.joinpath(*parts[:end])
        for candidate in (path / "__init__.py", path.with_suffix(".py")):
            if candidate.is_file():
                return candidate, parts[end:]
    raise ValueError(f"{name}: the wheel has no such module")


def _definition(sources: Path, module: Path, name: str) -> tuple[ast.stmt, Path]:
    """The statement that defines a name of a module, where necessary in the module it is imported from."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node, module
        if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets):
            return node, module
    for other, original in _imports(sources, module, tree, name):
        try:
            return _definition(sources, other, original)
        except ValueError:
            continue
    raise ValueError(f"{module.relative_to(sources)} has no {name}")


def _imports(sources: Path, module: Path, tree: ast.Module, name: str) -> Iterator[tuple[Path, str]]:
    """The files from which the module may have imported the name, and the name there."""
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        base = module.parents[node.level - 1] if node.level else sources
        path = base.joinpath(*node.module.split("."))
        for each in node.names:
            if each.name == "*" or (each.asname or each.name) == name:
                for candidate in (path / "__init__.py", path.with_suffix(".py")):
                    if candidate.is_file():
                        yield candidate, name if each.name == "*" else each.name


def _member(node: ast.ClassDef, name: str) -> ast.stmt | None:
    functions = (each for each in node.body if isinstance(each, ast.FunctionDef))
    return next((each for each in functions if each.name == name), None)


def _parameters(node: ast.stmt) -> str:
    if isinstance(node, ast.FunctionDef):
        return _of_function(node)
    if isinstance(node, ast.ClassDef):
        made = _member(node, "__init__")
        return _of_function(made) if isinstance(made, ast.FunctionDef) else _of_dataclass(node)
    return _CONSTANT


def _of_dataclass(node: ast.ClassDef) -> str:
    if not any("dataclass" in ast.unparse(each) for each in node.decorator_list):
        return _CONSTANT
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    return f"({', '.join(ast.unparse(each.target) + ('=...' if each.value else '') for each in fields)})"


def _of_function(node: ast.FunctionDef) -> str:
    arguments = node.args
    for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        each.annotation = None
    for optional in (arguments.vararg, arguments.kwarg):
        if optional is not None:
            optional.annotation = None
    ellipsis = ast.Constant(...)
    arguments.defaults = [ellipsis for _ in arguments.defaults]
    arguments.kw_defaults = [each and ellipsis for each in arguments.kw_defaults]
    if arguments.args and arguments.args[0].arg == "self":
        del arguments.args[0]
    return f"({ast.unparse(arguments)})"


if __name__ == "__main__":
    main()
