"""Which models run, read from the model files without running them: they import torch.

A family is a file of `workers/models` that declares ARCHITECTURES; its name is the `model_type`
of config.json.
"""

import ast
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_TABLE = "ARCHITECTURES"


@cache
def architectures() -> Mapping[str, Sequence[str]]:
    """The architectures of each model_type, as config.json names them."""
    package = find_spec("workers.models")
    assert package is not None and package.submodule_search_locations is not None
    files = sorted(path for place in package.submodule_search_locations for path in Path(place).glob("*.py"))
    return {path.stem: names for path in files if (names := _declared(path))}


def families() -> list[str]:
    """Every model_type that runs."""
    return sorted(architectures())


def check_runs(architecture: str, model_type: str | None, own_code: bool = False) -> None:
    """Raise ValueError, with what runs, for an architecture that has no model file.

    `own_code` says that the checkpoint brings Python files of its own (`auto_map`).
    """
    running = architectures()
    if architecture in running.get(model_type or "", ()):
        return
    for family, names in running.items():
        if architecture in names:
            raise ValueError(
                f"architecture {architecture} runs as model type {family}, not {model_type}; if it is "
                f'the same model, add --hf-overrides \'{{"model_type": "{family}"}}\''
            )
    code = "; the checkpoint's own code (auto_map) is never run" if own_code else ""
    runs = ", ".join(sorted(name for names in running.values() for name in names))
    raise ValueError(f"architecture {architecture} is not supported{code}; these run: {runs}")


def _declared(path: Path) -> tuple[str, ...]:
    """The keys of the file's table; empty for a file that is no family."""
    for statement in ast.parse(path.read_bytes()).body:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(keys=keys))
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Dict(keys=keys))
            ) if name == _TABLE:
                return tuple(str(ast.literal_eval(key)) for key in keys if key is not None)
    return ()
