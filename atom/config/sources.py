"""Settings that are not on the command line: from the environment, and from a file.

    command line  over  ATOM_<FIELD>  over  the file of --config  over  the default

A variable that is empty counts as unset. The file is flat YAML: one key for each flag, with
dashes or underscores. Everything given is checked, also what something else overrides.
"""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from atom.config.fields import ConfigError, Field, parse_switch
from atom.config.not_yet import REFUSED, refusal
from atom.utils.envs import VARIABLES

CONFIG_VARIABLE = "ATOM_CONFIG"
_PREFIX = "ATOM_"


def variable_of(name: str) -> str:
    """The environment variable of a field."""
    return _PREFIX + name.upper()


def environment_values(fields: Iterable[Field], environ: Mapping[str, str]) -> dict[str, Any]:
    """Values of the fields whose variable is set; raises ConfigError that names the variable."""
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
        # A variable that is known by itself keeps its own meaning.
        if variable not in VARIABLES and (text := environ.get(variable, "")):
            _check_refused(variable, name, text)
    return values


def _service_link(text: str) -> str:
    """Kubernetes sets NAME_PORT and others for each service, in every pod of its namespace."""
    if not text.startswith("tcp://"):
        return ""
    return " (set by Kubernetes for a service of that name: turn enableServiceLinks off in the pod)"


def unknown_variables(fields: Iterable[Field], environ: Mapping[str, str]) -> list[str]:
    """A line for each ATOM_ variable that nothing reads."""
    names = [field.name for field in fields] + list(REFUSED)
    known = {*map(variable_of, names), *VARIABLES, CONFIG_VARIABLE}
    return [
        f"{name} is set, and nothing reads it: {_nearest(name, known, 'no variable has a similar name')}"
        for name in sorted(environ)
        if name.startswith(_PREFIX) and environ[name] and name not in known
    ]


def file_values(path: str, fields: Iterable[Field]) -> dict[str, Any]:
    """Values of the fields that the file names; raises ConfigError that names file and key."""
    by_name = {field.name: field for field in fields}
    values: dict[str, Any] = {}
    for key, value in _read(path).items():
        name, where = key.replace("-", "_"), f"{path}: {key}"
        if name in values:
            raise ConfigError(f"{where} is given twice")
        if name in REFUSED:
            _check_refused(where, name, value)
        elif name not in by_name:
            raise ConfigError(f"{where} is no setting: {_nearest(name, by_name, 'see --help')}")
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
    if isinstance(value, str) and REFUSED[name].neutral in ("True", "False"):
        try:
            value = parse_switch(value)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    if reason := refusal(name, value):
        raise ConfigError(f"{where}: {reason}")


def _nearest(name: str, known: Iterable[str], otherwise: str) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else otherwise


class _Loader(yaml.SafeLoader):
    """Plain data only, and no key twice: YAML itself would let the last one win."""

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
        # A subclass of the safe loader.
        content = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {_problem(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"{path}: it must hold lines of the form `flag: value`")
    return content


def _problem(error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem is None:
        return "it is no YAML: " + " ".join(str(error).split())
    mark = error.problem_mark
    return error.problem + (f" (line {mark.line + 1})" if mark is not None else "")
