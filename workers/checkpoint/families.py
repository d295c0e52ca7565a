"""The supported models, parsed from the model files without importing them (they import torch).

A model family is a file of `workers/models` that declares ARCHITECTURES; its name is the `model_type`
of config.json. Families with recurrent states declare KEEPS_STATES = True, those whose vision tower runs
IMAGE_PROCESSOR, which `workers.checkpoint.image_settings` knows, those whose config.json may lack
what every model needs, such as vocab_size, CONFIG_DEFAULTS. Families that can run their layers for
multi-token prediction declare MTP_FIELD, the field of config.json that counts them; those whose layers
do not hand out hidden states to drafters declare AUX_HIDDEN_STATES = False.
"""

import ast
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_ARCHITECTURES = "ARCHITECTURES"
_KEEPS_STATES = "KEEPS_STATES"
_CONFIG_DEFAULTS = "CONFIG_DEFAULTS"
_MTP_FIELD = "MTP_FIELD"
_IMAGE_PROCESSOR = "IMAGE_PROCESSOR"
_AUX_HIDDEN_STATES = "AUX_HIDDEN_STATES"


@cache
def architectures() -> Mapping[str, Sequence[str]]:
    """The architectures of each model_type, as config.json names them."""
    return {
        path.stem: names for path in _files() if (names := tuple(map(str, _declared(path, _ARCHITECTURES))))
    }


def families() -> list[str]:
    """Every supported model_type."""
    return sorted(architectures())


@cache
def keeps_states(model_type: str) -> bool:
    """Whether the family has layers with recurrent states, whose prefixes cannot be cached."""
    return any(_declared(path, _KEEPS_STATES) == (True,) for path in _files() if path.stem == model_type)


@cache
def has_aux_hidden_states(model_type: str) -> bool:
    """Whether the family's models hand out hidden states of their layers, which some drafters read."""
    stated = (_declared(path, _AUX_HIDDEN_STATES) for path in _files() if path.stem == model_type)
    return (False,) not in stated


@cache
def image_processor(model_type: str) -> str | None:
    """What prepares images for the family; None if it does not run the vision tower of its checkpoints."""
    found = (_declared(path, _IMAGE_PROCESSOR) for path in _files() if path.stem == model_type)
    return next((str(name) for names in found for name in names), None)


@cache
def config_defaults(model_type: str | None) -> Mapping[str, object]:
    """What config.json of the family may leave out although every model needs it."""
    found = (_literal(path, _CONFIG_DEFAULTS) for path in _files() if path.stem == model_type)
    return next((value for value in found if isinstance(value, dict)), {})


def mtp_layers(model_type: str, config: Mapping[str, Any]) -> int:
    """Layers for multi-token prediction of a checkpoint; 0 for a family that cannot run them."""
    fields = [name for path in _files() if path.stem == model_type for name in _declared(path, _MTP_FIELD)]
    return sum(int(config.get(str(name)) or 0) for name in fields)


def check_supported(architecture: str, model_type: str | None, own_code: bool = False) -> None:
    """Raise ValueError for an architecture without a model file.

    `own_code`: whether the checkpoint has Python files (`auto_map`).
    """
    supported = architectures()
    if architecture in supported.get(model_type or "", ()):
        return
    for family, names in supported.items():
        if architecture in names:
            raise ValueError(
                f"architecture {architecture} is supported as model type {family}, not {model_type}; if it "
                f'is the same model, add --hf-overrides \'{{"model_type": "{family}"}}\''
            )
    code = "; the checkpoint's own code (auto_map) is never run" if own_code else ""
    listed = ", ".join(sorted({name for names in supported.values() for name in names}))
    raise ValueError(f"architecture {architecture} is not supported{code}; supported are: {listed}")


def _files() -> list[Path]:
    package = find_spec("workers.models")
    assert package is not None and package.submodule_search_locations is not None
    return sorted(path for folder in package.submodule_search_locations for path in Path(folder).glob("*.py"))


def _literal(path: Path, wanted: str) -> object:
    """The constant that the file assigns to a name; None if there is none."""
    for statement in ast.parse(path.read_bytes()).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name == wanted:
                return ast.literal_eval(value)
    return None


def _declared(path: Path, wanted: str) -> tuple[object, ...]:
    """The value that the file assigns to a name: a dict's keys, or one constant; empty if there is none."""
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
