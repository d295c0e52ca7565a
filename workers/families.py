"""Which models run, read from the model files without running them: they import torch.

A family is a file of `workers/models` that declares ARCHITECTURES; its name is the `model_type`
of config.json. One whose layers keep recurrent states declares KEEPS_STATES = True, too.
"""

import ast
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_TABLE, _STATES = "ARCHITECTURES", "KEEPS_STATES"


@cache
def architectures() -> Mapping[str, Sequence[str]]:
    """The architectures of each model_type, as config.json names them."""
    return {path.stem: names for path in _files() if (names := tuple(map(str, _declared(path, _TABLE))))}


def families() -> list[str]:
    """Every model_type that runs."""
    return sorted(architectures())


@cache
def keeps_states(model_type: str) -> bool:
    """Whether layers of the family sum up what they have read, so that no part of it can be shared."""
    return any(_declared(path, _STATES) == (True,) for path in _files() if path.stem == model_type)


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


def _files() -> list[Path]:
    package = find_spec("workers.models")
    assert package is not None and package.submodule_search_locations is not None
    return sorted(path for place in package.submodule_search_locations for path in Path(place).glob("*.py"))


def _declared(path: Path, wanted: str) -> tuple[object, ...]:
    """What the file assigns to a name: the keys of a table, or one value; empty where it does not."""
    for statement in ast.parse(path.read_bytes()).body:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=value)
            ) if name == wanted:
                if isinstance(value, ast.Dict):
                    return tuple(ast.literal_eval(key) for key in value.keys if key is not None)
                if isinstance(value, ast.Constant):
                    return (value.value,)
    return ()
