"""Interfaces of a host's wheel, read without installing it: what a plugin uses of it and a version lacks."""

import ast
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

Names = Mapping[str, Mapping[str, tuple[str, ...]]]


@dataclass(frozen=True)
class Interfaces:
    """What a plugin uses of its host, by file of the host's package."""

    functions: Names = field(default_factory=dict)
    """Functions, variables and methods as Class.method, with their parameters."""
    classes: Names = field(default_factory=dict)
    """Classes, with their members."""
    texts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Pieces of source."""

    def missing(self, wheel: "Wheel") -> Iterator[str]:
        """The name of each file, function, parameter, class or member that the wheel lacks."""
        for file, texts in self.texts.items():
            yield from (f"{file}: {text}" for text in texts if text not in wheel.text(file))
        for file, names in self.functions.items():
            yield from without_parameters(wheel, file, names)
        for file, classes in self.classes.items():
            for name, members in classes.items():
                has = members_of(wheel.found(file, name))
                yield from (f"{file}: {name}.{member}" for member in members if member not in has)
                if not has:
                    yield f"{file}: {name}"


class Wheel:
    """The modules of a package in a wheel."""

    def __init__(self, path: Path, package: str):
        self._package = package
        self._archive = zipfile.ZipFile(path)
        self._trees: dict[str, ast.Module] = {}

    def text(self, file: str) -> str:
        """The source of a module; empty if there is none."""
        name = f"{self._package}/{file}"
        return self._archive.read(name).decode() if name in self._archive.namelist() else ""

    def tree(self, file: str) -> ast.Module:
        """The module's statements, those of a missing one are none."""
        if file not in self._trees:
            self._trees[file] = ast.parse(self.text(file))
        return self._trees[file]

    def found(self, file: str, name: str) -> ast.AST | None:
        """A function, class or variable of the module, or a method as Class.method."""
        body: list[ast.stmt] = self.tree(file).body
        where: ast.AST | None = None
        for part in name.split("."):
            where = next((each for each in body if part in _names(each)), None)
            body = where.body if isinstance(where, ast.ClassDef) else []
        return where


def check_wheels(
    wheels: Path | None, host: str, missing: Callable[[Path], Iterator[str]]
) -> dict[str, list[str]]:
    """What each wheel of the directory lacks, by its name; `host` begins the names of its wheels."""
    if wheels is None:
        return {"contract": ["--wheels names no directory"]}
    paths = sorted(wheels.glob(f"{host.lower()}*.whl"))
    if not paths:
        return {"contract": [f"{wheels} has no wheel of {host}"]}
    return {f"contract, {path.name.rsplit('-', 3)[0]}": list(missing(path)) for path in paths}


def without_parameters(wheel: Wheel, file: str, names: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Functions and parameters that the file lacks."""
    for name, parameters in names.items():
        found = wheel.found(file, name)
        if found is None:
            yield f"{file}: {name}"
        elif isinstance(found, ast.FunctionDef):
            has = [each.arg for each in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)]
            yield from (f"{file}: {name}({wanted})" for wanted in parameters if wanted not in has)


def members_of(found: ast.AST | None) -> set[str]:
    """Fields and methods of a class, and what its methods assign to self."""
    if not isinstance(found, ast.ClassDef):
        return set()
    own = {name for each in found.body for name in _names(each)}
    assigned = {
        node.attr
        for node in ast.walk(found)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    }
    return own | assigned


def _names(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Assign(targets=targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
    return []
