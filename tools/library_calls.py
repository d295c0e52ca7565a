"""What our code uses of AITER, MORI and amdsmi, which are not installed here: found in the syntax tree.

A use is a dotted name of the library, with its call if it is one: `import mori.ops; mori.ops.Op(config=c)`,
`from aiter.dist import f; f(x=x)`, and for an object that is annotated with a class of the library, or
made by one, its methods: `op: Op | None`, `op.dispatch(...)`.

`uses` raises ValueError for code that would hide a use: a module or function of the library that is
passed on, unpacked arguments, an import by name.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LIBRARIES = {"mori": "amd-mori", "aiter": "amd-aiter", "amdsmi": "amdsmi"}
"""The distribution of each import name."""


@dataclass(frozen=True)
class Use:
    """One place that names something of a library."""

    name: str
    """Dotted: module, then class or function, then method."""
    call: ast.Call | None
    place: str
    """path:line"""


def uses(source: str, path: str | Path) -> list[Use]:
    """Every use in a file's source. Raises ValueError where a use could be hidden."""
    if not any(name in source for name in LIBRARIES):
        return []
    tree = ast.parse(source)
    finder = _Finder(str(path), _imported(tree))
    finder.types = _types(tree, finder.imported)
    finder.visit(tree)
    return finder.found


def _imported(tree: ast.Module) -> dict[str, str]:
    """The dotted name of everything imported from the libraries, by the name it has in the file."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if _is_library(each.name):
                    names[each.asname or each.name.split(".")[0]] = (
                        each.name if each.asname else _root(each.name)
                    )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level and _is_library(node.module):
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return names


def _types(tree: ast.Module, imported: dict[str, str]) -> dict[str, str]:
    """The library's class of each variable or attribute, by its source text: `self._op`."""
    types: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            types |= dict.fromkeys([ast.unparse(node.target)], _annotated(node.annotation, imported))
        elif isinstance(node, ast.arg) and node.annotation is not None:
            types[node.arg] = _annotated(node.annotation, imported)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made = _dotted(node.value.func, imported)
            if made is not None and made.rpartition(".")[2][:1].isupper():
                types |= {ast.unparse(target): made for target in node.targets}
    return {name: each for name, each in types.items() if each}


def _annotated(annotation: ast.expr, imported: dict[str, str]) -> str:
    """The library's class that an annotation names, or nothing: `Op`, `"Op | None"`."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    found = (_dotted(node, imported) for node in ast.walk(annotation) if isinstance(node, ast.expr))
    return max((name for name in found if name), key=len, default="")


class _Finder(ast.NodeVisitor):
    types: dict[str, str]

    def __init__(self, path: str, imported: dict[str, str]):
        self._path = path
        self.imported = imported
        self.found: list[Use] = []

    def visit_Call(self, node: ast.Call) -> None:
        name = self._name(node.func)
        if name is None:
            self._check_import(node)
            self.generic_visit(node)
            return
        if any(isinstance(each, ast.Starred) for each in node.args) or None in {k.arg for k in node.keywords}:
            raise ValueError(f"{self._place(node)}: {name} is called with unpacked arguments")
        self.found.append(Use(name, node, self._place(node)))
        for each in (*node.args, *node.keywords):
            self.visit(each)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self._name(node)
        if name is None:
            self.generic_visit(node)
        else:
            self.found.append(Use(name, None, self._place(node)))

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and node.id in self.imported:
            self.found.append(Use(self.imported[node.id], None, self._place(node)))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:  # an annotation is no use
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        """Skip annotations: they use nothing of a library."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for each in (node.args, *node.body, *node.decorator_list):
            self.visit(each)

    def _name(self, node: ast.expr) -> str | None:
        """The dotted name of something of a library."""
        if isinstance(node, ast.Attribute) and (made := self.types.get(ast.unparse(node.value))):
            return f"{made}.{node.attr}"
        return _dotted(node, self.imported)

    def _check_import(self, node: ast.Call) -> None:
        if ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__"):
            for each in node.args:
                if isinstance(each, ast.Constant) and _is_library(str(each.value)):
                    raise ValueError(f"{self._place(node)}: imports {each.value} by name")

    def _place(self, node: ast.AST) -> str:
        return f"{self._path}:{getattr(node, 'lineno', 0)}"


def _dotted(node: ast.expr, imported: dict[str, str]) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in imported:
        return None
    return ".".join([imported[node.id], *reversed(parts)])


def _root(name: str) -> str:
    return name.split(".")[0]


def _is_library(name: str) -> bool:
    return _root(name) in LIBRARIES


def package_uses(files: Iterator[Path] | list[Path]) -> list[Use]:
    """The uses in all of these files."""
    return [use for path in files for use in uses(path.read_text(encoding="utf-8"), path)]
