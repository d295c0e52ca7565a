"""Settings from the environment and from the file of --config.

Precedence: command line, ATOM_<FIELD>, the file, the default. An empty variable counts as unset.
The file is flat YAML with one key per flag, spelled with dashes or underscores. Every value is
checked, also one that is overridden.
"""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from atom.shared.config.fields import ConfigError, Field
from atom.shared.config.not_yet import REFUSED, refusal
from atom.shared.config.other_engines import setting_advice
from atom.shared.utils.envs import VARIABLES

CONFIG_VARIABLE = "ATOM_CONFIG"
_PREFIX = "ATOM_"


def variable_of(name: str) -> str:
    """The environment variable of a field."""
    return _PREFIX + name.upper()


def environment_values(fields: Iterable[Field], environ: Mapping[str, str]) -> dict[str, Any]:
    """Values by field name, from the variables that are set. Raises ConfigError with the variable."""
    values = {}
    for field in fields:
        variable = variable_of(field.name)
        if text := environ.get(variable, ""):
            try:
                values[field.name] = field.parse(text)
            except ConfigError as error:
                raise ConfigError(f"{variable}: {error}{_service_link(text)}") from None
    for name in REFUSED:
        variable = variable_of(name)
        # A variable of the same name in VARIABLES has its own meaning.
        if variable not in VARIABLES and (text := environ.get(variable, "")):
            _check_refused(variable, name, text)
    return values


def _service_link(text: str) -> str:
    """A hint for values like ATOM_PORT=tcp://…, which Kubernetes sets for a service called atom."""
    if not text.startswith("tcp://"):
        return ""
    return " (Kubernetes sets it for a service of that name: set enableServiceLinks to false in the pod)"


def unknown_variables(fields: Iterable[Field], environ: Mapping[str, str]) -> list[str]:
    """A log line for each ATOM_ variable that is not known."""
    names = [field.name for field in fields] + list(REFUSED)
    known = {*map(variable_of, names), *VARIABLES, CONFIG_VARIABLE}
    return [
        f"{name} is set but unknown: {_nearest(name, known, 'no variable has a similar name')}"
        for name in sorted(environ)
        if name.startswith(_PREFIX) and environ[name] and name not in known
    ]


def file_values(path: str, fields: Iterable[Field]) -> dict[str, Any]:
    """Values by field name, from the file. Raises ConfigError with file and key."""
    by_name = {field.name: field for field in fields}
    values: dict[str, Any] = {}
    for key, value in _read(path).items():
        name = key.replace("-", "_")
        where = f"{path}: {key}"
        if name in values:
            raise ConfigError(f"{where} is given twice")
        if name in REFUSED:
            _check_refused(where, name, value)
        elif name not in by_name:
            advice = setting_advice(name) or _nearest(name, by_name, "see --help")
            raise ConfigError(f"{where} is not a setting: {advice}")
        else:
            values[name] = _checked(by_name[name], value, where)
    return values


def _checked(field: Field, value: Any, where: str) -> Any:
    try:
        return field.check(value)
    except ConfigError as error:
        quotes = "; put it in quotes" if field.kind is str and isinstance(value, int | float) else ""
        raise ConfigError(f"{where}: {error}{quotes}") from None


def _check_refused(where: str, name: str, value: object) -> None:
    try:
        reason = refusal(name, value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if reason:
        raise ConfigError(f"{where}: {reason}")


def _nearest(name: str, known: Iterable[str], otherwise: str) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else otherwise


class _Loader(yaml.SafeLoader):
    """Loads plain data, and raises for a duplicate key, of which YAML keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [str(self.construct_object(key, deep=True)) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _read(path: str) -> dict[str, Any]:
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--config {path}: the file is not UTF-8 text") from None
    try:
        content = yaml.load(text, _Loader)  # a subclass of SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {_problem(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{path}: it must contain lines of the form `flag: value`")
    return content


def _problem(error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem is None:
        return "it is not YAML: " + " ".join(str(error).split())
    mark = error.problem_mark
    return error.problem + (f" (line {mark.line + 1})" if mark is not None else "")
