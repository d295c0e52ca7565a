"""The command line and the keyword arguments, built from the configuration classes.

Every flag is accepted with dashes and with underscores. Values that the user gave are told
apart from defaults (`explicit_fields`), so that a choice without effect can be named.
"""

import argparse
import difflib
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn, TypeVar

from atom.config.engine import EngineConfig
from atom.config.fields import ConfigError, Field, fields_of
from atom.config.not_yet import REFUSED, refusal
from atom.config.server import ServerConfig

__all__ = [
    "CommandLineParser",
    "ConfigError",
    "add_engine_args",
    "add_server_args",
    "engine_config_from",
    "engine_config_from_kwargs",
    "explicit_fields",
    "server_config_from",
]

C = TypeVar("C")

_SHORT_NAMES = {"tensor_parallel_size": "-tp"}
_EXPLICIT = "_explicit_fields"
_BAD_COMMAND_LINE = 2


class CommandLineParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with exit status 2."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Print `error: …` and exit."""
        self.exit(_BAD_COMMAND_LINE, f"error: {message.removeprefix('argument ')}\n")

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """As argparse, with the nearest known flag beside an unknown one."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown(unknown[0]))
        return parsed

    def _unknown(self, argument: str) -> str:
        name = argument.partition("=")[0].replace("_", "-")
        if not name.startswith("-"):
            return f"unexpected argument {argument!r}: every setting is a flag, see --help"
        flags = [flag for action in self._actions for flag in action.option_strings if "_" not in flag]
        near = difflib.get_close_matches(name, flags, n=1)
        return f"unknown flag {argument}: " + (f"did you mean {near[0]}?" if near else "see --help")


def add_engine_args(parser: argparse.ArgumentParser) -> None:
    """Add a group of flags for each concern of the engine, and the names that are refused."""
    for concern in _concerns():
        _add_group(parser, concern)
    for name, entry in REFUSED.items():
        flags = [flag for flag in (entry.short, *_spellings(name)) if flag]
        parser.add_argument(*flags, dest=name, action=_Refuse, nargs="?", help=argparse.SUPPRESS)


def add_server_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the HTTP side."""
    _add_group(parser, ServerConfig)


def engine_config_from(namespace: argparse.Namespace) -> EngineConfig:
    """The engine's part of parsed arguments; raises ConfigError for a value that cannot be."""
    return _engine_config(vars(namespace))


def server_config_from(namespace: argparse.Namespace) -> ServerConfig:
    """The server's part of parsed arguments; raises ConfigError for a value that cannot be."""
    return _build(ServerConfig, vars(namespace))


def engine_config_from_kwargs(**options: Any) -> EngineConfig:
    """A configuration from flat field names.

    Raises TypeError for an unknown name, ConfigError for a value that cannot be.
    """
    known = [field.name for concern in _concerns() for field in fields_of(concern)]
    for name, value in options.items():
        if name in REFUSED and (reason := refusal(name, value)):
            raise ConfigError(f"{name}={value!r}: {reason}")
        if name not in known and name not in REFUSED:
            raise TypeError(f"unknown setting {name!r}; known are {', '.join(sorted(known))}")
    return _engine_config(options)


def explicit_fields(namespace: argparse.Namespace) -> set[str]:
    """Names of the fields that the command line gave."""
    return set(getattr(namespace, _EXPLICIT, ()))


def flags_of(field: Field) -> list[str]:
    """The spellings to show: the flag with dashes, and its short name."""
    flag = "--" + field.name.replace("_", "-")
    if field.kind is bool and field.default:
        return [flag, "--no-" + flag[2:]]
    short = _SHORT_NAMES.get(field.name)
    return [flag, short] if short else [flag]


class _Store(argparse.Action):
    """Stores a value and notes that the user gave it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        _note_explicit(namespace, self.dest)
        setattr(namespace, self.dest, values)


class _Switch(argparse.Action):
    """`--name` and `--no-name`."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        _note_explicit(namespace, self.dest)
        setattr(namespace, self.dest, not (option_string or "").startswith(("--no-", "--no_")))


class _Refuse(argparse.Action):
    """A known name that this engine cannot serve, unless its value asks for nothing."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        bare = values is None
        negated = (option_string or "").startswith(("--no-", "--no_"))
        if reason := refusal(self.dest, not negated if bare else values):
            raise argparse.ArgumentError(None, f"{option_string}: {reason}")


def _note_explicit(namespace: argparse.Namespace, name: str) -> None:
    vars(namespace).setdefault(_EXPLICIT, set()).add(name)


def _concerns() -> list[type[Any]]:
    return [field.default_factory for field in fields(EngineConfig)]  # type: ignore[misc]


def _add_group(parser: argparse.ArgumentParser, config_class: type[Any]) -> None:
    group = parser.add_argument_group(config_class.__name__.removesuffix("Config").lower())
    for field in fields_of(config_class):
        shown, *twins = _spelling_sets(field)
        _add_flag(group, field, shown, _help_of(field))
        for twin in twins:
            _add_flag(group, field, twin, argparse.SUPPRESS)


def _add_flag(group: argparse._ArgumentGroup, field: Field, flags: list[str], help_text: str) -> None:
    if field.kind is bool:
        group.add_argument(
            *flags, dest=field.name, action=_Switch, nargs=0, default=field.default, help=help_text
        )
        return
    group.add_argument(
        *flags,
        dest=field.name,
        action=_Store,
        type=_parser_of(field, flags[0]),
        default=field.default,
        metavar="{" + ",".join(field.choices) + "}" if field.choices else _METAVARS[field.kind],
        help=help_text,
    )


_METAVARS = {int: "N", float: "X", str: "TEXT"}


def _parser_of(field: Field, flag: str) -> Any:
    def parse(text: str) -> Any:
        try:
            return field.parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _spelling_sets(field: Field) -> list[list[str]]:
    """First the spellings that --help shows, then the twins with underscores."""
    shown = flags_of(field)
    every = _spellings(field.name) if field.kind is bool else _spellings(field.name)[:2]
    twins = [flag for flag in every if flag not in shown]
    return [shown, twins] if twins else [shown]


def _spellings(name: str) -> list[str]:
    """With dashes and underscores, plain and negated; each once."""
    dashed = name.replace("_", "-")
    every = [f"--{dashed}", f"--{name}", f"--no-{dashed}", f"--no-{name}", f"--no_{name}"]
    return list(dict.fromkeys(every))


def _help_of(field: Field) -> str:
    default = (
        ""
        if field.default is None or (field.kind is bool and not field.default)
        else f" Default: {_shown(field)}."
    )
    return (field.help + default).replace("%", "%%")


def _shown(field: Field) -> str:
    return "on" if field.default is True else str(field.default)


def _engine_config(values: dict[str, Any]) -> EngineConfig:
    parts = {
        part.name: _build(concern, values)
        for part, concern in zip(fields(EngineConfig), _concerns(), strict=True)
    }
    return EngineConfig(**parts)


def _build(config_class: type[C], values: dict[str, Any]) -> C:
    chosen = {}
    for field in fields_of(config_class):
        if field.name not in values:
            continue
        try:
            chosen[field.name] = field.check(values[field.name])
        except ConfigError as error:
            raise ConfigError(f"{field.name}: {error}") from None
    return config_class(**chosen)
