"""Command line and keyword arguments, built from the configuration classes.

Every flag is accepted with dashes and with underscores, and has a variable and a key in the
file of --config (see `sources`). `explicit_fields` distinguishes values that the user set from
defaults, so that a setting without effect can be reported.
"""

import argparse
import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NoReturn, TypeVar

from atom.shared.config.engine import EngineConfig
from atom.shared.config.fields import NAMES, ConfigError, Field, fields_of, names_text
from atom.shared.config.launchers import launcher_settings
from atom.shared.config.nodes import NodesConfig
from atom.shared.config.not_yet import REFUSED, refusal
from atom.shared.config.server import ServerConfig
from atom.shared.config.sources import CONFIG_VARIABLE, environment_values, file_values, variable_of

__all__ = [
    "CommandLineParser",
    "ConfigError",
    "add_engine_args",
    "add_nodes_args",
    "add_program_args",
    "add_server_args",
    "all_fields",
    "engine_config_from",
    "engine_config_from_kwargs",
    "explicit_fields",
    "nodes_config_from",
    "server_config_from",
    "with_environment",
    "with_launcher",
    "with_sources",
]

C = TypeVar("C")

_SHORT_NAMES = {
    "tensor_parallel_size": ["-tp", "--tp"],
    "decode_context_parallel_size": ["-dcp"],
    "data_parallel_size": ["-dp", "--dp"],
}
_EXPLICIT = "_explicit_fields"
_BAD_COMMAND_LINE = 2
_SHELLS = ("bash", "zsh", "tcsh")
# Fields that a shell completes as paths, and the completion function of each shell.
_PATHS = frozenset(
    {
        "model",
        "download_dir",
        "step_trace",
        "torch_profiler_dir",
        "chat_template",
        "admin_socket",
        "ssl_certfile",
        "ssl_keyfile",
        "ssl_ca_certs",
        "cluster_secret_file",
    }
)
_COMPLETE_PATHS = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}


class CommandLineParser(argparse.ArgumentParser):
    """Prints errors on one line with exit status 2, and has `--help TOPIC`."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, add_help=False, **options)
        self.add_argument(
            "-h",
            "--help",
            action=_Help,
            nargs="?",
            metavar="TOPIC",
            help="Show all flags, those of a group, or those that mention a word.",
        )

    def format_topic(self, topic: str) -> str:
        """Help on the group `topic`, or else on the flags that mention the word; empty if there are none."""
        word = topic.lstrip("-").replace("_", "-").lower()
        named = word in self.groups()
        formatter = self._get_formatter()
        for group in self._action_groups:
            actions = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
            formatter.start_section(group.title)
            formatter.add_arguments(
                action for action in actions if (group.title == word if named else _mentions(action, word))
            )
            formatter.end_section()
        return formatter.format_help()

    def groups(self) -> list[str]:
        """Titles of the groups that have flags."""
        return [group.title or "" for group in self._action_groups if group._group_actions]

    def error(self, message: str) -> NoReturn:
        """Print `error: …` and exit."""
        self.exit(_BAD_COMMAND_LINE, f"error: {message.removeprefix('argument ')}\n")

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """As argparse; the error for an unknown flag names the nearest known one."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown(unknown[0]))
        return parsed

    def _unknown(self, argument: str) -> str:
        name = argument.partition("=")[0].replace("_", "-")
        if not name.startswith("-"):
            return f"unexpected argument {argument!r}: all settings are flags, see --help"
        flags = [flag for action in self._actions for flag in action.option_strings if "_" not in flag]
        near = difflib.get_close_matches(name, flags, n=1)
        return f"unknown flag {argument}: " + (f"did you mean {near[0]}?" if near else "see --help")


def add_engine_args(parser: argparse.ArgumentParser) -> None:
    """Add a group of flags per engine configuration class, and the refused flags."""
    for concern in _concerns():
        _add_group(parser, concern)
    for name, entry in REFUSED.items():
        flags = [flag for flag in (entry.short, *_spellings(name)) if flag]
        parser.add_argument(*flags, dest=name, action=_Refuse, nargs="?", help=argparse.SUPPRESS)


def add_server_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the HTTP server."""
    _add_group(parser, ServerConfig)


def add_nodes_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a node's place among several."""
    _add_group(parser, NodesConfig)


def add_program_args(parser: argparse.ArgumentParser) -> None:
    """Add --config, --plan, --json and --print-completion."""
    config = parser.add_argument(
        "--config", metavar="FILE", help=f"YAML file with one key per flag. [env: {CONFIG_VARIABLE}]"
    )
    _complete_paths(config)
    parser.add_argument(
        "--plan",
        nargs="?",
        const="",
        metavar="GPUS",
        help="Show the memory that the model needs, without loading it, and exit: on this host, or on "
        "assumed GPUs (8x80: eight of 80 GiB).",
    )
    parser.add_argument("--json", action="store_true", help="With --plan: print JSON.")
    parser.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        choices=_SHELLS,
        help="Print a completion script for this shell and exit.",
    )


def all_fields() -> list[Field]:
    """Every field of the configuration of engine, server and nodes."""
    return [field for concern in (*_concerns(), ServerConfig, NodesConfig) for field in fields_of(concern)]


def with_sources(
    namespace: argparse.Namespace, environ: Mapping[str, str] = os.environ
) -> argparse.Namespace:
    """The namespace, with values from the environment and the --config file where a flag is absent.

    Raises ConfigError with the variable, or the file and the key.
    """
    path = namespace.config or environ.get(CONFIG_VARIABLE)
    from_file = file_values(path, all_fields()) if path else {}
    return _filled(namespace, from_file | environment_values(all_fields(), environ))


def with_launcher(
    namespace: argparse.Namespace, environ: Mapping[str, str] = os.environ
) -> argparse.Namespace:
    """The namespace after `with_sources`, with what a launcher's environment says of this node.

    It has no place among others where --nnodes 1 is given. Raises ConfigError with the variable.
    """
    given = explicit_fields(namespace)
    found = launcher_settings(environ, given)
    if "nnodes" in given and namespace.nnodes == 1:
        places = {field.name for field in fields_of(NodesConfig)}
        found = {name: value for name, value in found.items() if name not in places}
    return _filled(namespace, found)


def with_environment(
    namespace: argparse.Namespace, environ: Mapping[str, str] = os.environ
) -> argparse.Namespace:
    """As `with_sources`, for programs with engine flags only and without --config."""
    engine = [field for concern in _concerns() for field in fields_of(concern)]
    return _filled(namespace, environment_values(engine, environ))


def _filled(namespace: argparse.Namespace, values: dict[str, Any]) -> argparse.Namespace:
    given = explicit_fields(namespace)
    made = argparse.Namespace(**{**vars(namespace), _EXPLICIT: given | values.keys()})
    for name, value in values.items():
        if name not in given:
            setattr(made, name, value)
    return made


def engine_config_from(namespace: argparse.Namespace) -> EngineConfig:
    """The engine configuration of parsed arguments. Raises ConfigError for an invalid value."""
    return _engine_config(vars(namespace))


def server_config_from(namespace: argparse.Namespace) -> ServerConfig:
    """The server configuration of parsed arguments. Raises ConfigError for an invalid value."""
    return _build(ServerConfig, vars(namespace))


def engine_config_from_kwargs(**options: Any) -> EngineConfig:
    """The engine configuration of keyword arguments named like the fields.

    Raises TypeError for an unknown name, ConfigError for an invalid value.
    """
    known = [field.name for concern in _concerns() for field in fields_of(concern)]
    for name, value in options.items():
        if name in REFUSED and (reason := refusal(name, value)):
            raise ConfigError(f"{name}={value!r}: {reason}")
        if name not in known and name not in REFUSED:
            raise TypeError(f"unknown setting {name!r}; known settings: {', '.join(sorted(known))}")
    return _engine_config(options)


def nodes_config_from(namespace: argparse.Namespace) -> NodesConfig:
    """This node's place, of parsed arguments. Raises ConfigError for an invalid value."""
    return _build(NodesConfig, vars(namespace))


def explicit_fields(namespace: argparse.Namespace) -> set[str]:
    """Names of the fields that the user set."""
    return set(getattr(namespace, _EXPLICIT, ()))


def flags_of(field: Field) -> list[str]:
    """The documented spellings: the flag with dashes, and its short or negated forms."""
    flag = "--" + field.name.replace("_", "-")
    if field.kind is bool and field.default:
        return [flag, "--no-" + flag[2:]]
    return [flag, *_SHORT_NAMES.get(field.name, [])]


class _Store(argparse.Action):
    """Stores a value and records that the user set it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        _note_explicit(namespace, self.dest)
        setattr(namespace, self.dest, values)


class _StoreNames(argparse.Action):
    """Stores one or several names, as one text."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        _note_explicit(namespace, self.dest)
        try:
            names = names_text(values[0] if len(values) == 1 else values)
        except ConfigError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        setattr(namespace, self.dest, names)


class _Switch(argparse.Action):
    """`--name` and `--no-name`."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        _note_explicit(namespace, self.dest)
        setattr(namespace, self.dest, not (option_string or "").startswith(("--no-", "--no_")))


class _Refuse(argparse.Action):
    """Refuses a flag of `REFUSED`, except with its neutral value."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        bare = values is None
        negated = (option_string or "").startswith(("--no-", "--no_"))
        if reason := refusal(self.dest, not negated if bare else values):
            raise argparse.ArgumentError(None, f"{option_string}: {reason}")


class _Help(argparse.Action):
    """`--help`, `--help GROUP` and `--help WORD`."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        text = parser.format_help() if values is None else parser.format_topic(values)
        if not text:
            groups = ", ".join(parser.groups())
            parser.error(f"--help {values}: no flag mentions it; the groups are {groups}")
        print(text, end="")
        parser.exit()


class _PrintCompletion(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        import shtab

        print(shtab.complete(parser, values))
        parser.exit()


def _mentions(action: argparse.Action, word: str) -> bool:
    """Whether a word in the names or the help of a flag starts with `word`."""
    text = " ".join([*action.option_strings, action.help or ""]).lower()
    return re.search(r"(?<![a-z0-9])" + re.escape(word), text) is not None


def _complete_paths(action: argparse.Action) -> None:
    action.complete = _COMPLETE_PATHS  # type: ignore[attr-defined]


def _note_explicit(namespace: argparse.Namespace, name: str) -> None:
    vars(namespace).setdefault(_EXPLICIT, set()).add(name)


def _concerns() -> list[type[Any]]:
    return [field.default_factory for field in fields(EngineConfig)]  # type: ignore[misc]


def _add_group(parser: argparse.ArgumentParser, config_class: type[Any]) -> None:
    group = parser.add_argument_group(config_class.__name__.removesuffix("Config").lower())
    for field in fields_of(config_class):
        shown, *hidden = _spelling_sets(field)
        _add_flag(group, field, shown, _help_of(field))
        for spellings in hidden:
            _add_flag(group, field, spellings, argparse.SUPPRESS)


def _add_flag(group: argparse._ArgumentGroup, field: Field, flags: list[str], help_text: str) -> None:
    if field.kind is bool:
        group.add_argument(
            *flags, dest=field.name, action=_Switch, nargs=0, default=field.default, help=help_text
        )
        return
    if field.limits == NAMES:
        group.add_argument(
            *flags,
            dest=field.name,
            action=_StoreNames,
            nargs="+",
            default=field.default,
            metavar="NAME",
            help=help_text,
        )
        return
    action = group.add_argument(
        *flags,
        dest=field.name,
        action=_Store,
        type=_parser_of(field),
        default=field.default,
        choices=field.choices or None,
        metavar="{" + ",".join(field.choices) + "}" if field.choices else _METAVARS[field.kind],
        help=help_text,
    )
    if field.name in _PATHS:
        _complete_paths(action)


_METAVARS = {int: "N", float: "X", str: "TEXT"}


def _parser_of(field: Field) -> Any:
    def parse(text: str) -> Any:
        try:
            return field.parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _spelling_sets(field: Field) -> list[list[str]]:
    """First the spellings that --help shows, then those with underscores."""
    shown = flags_of(field)
    every = _spellings(field.name) if field.kind is bool else _spellings(field.name)[:2]
    hidden = [flag for flag in every if flag not in shown]
    return [shown, hidden] if hidden else [shown]


def _spellings(name: str) -> list[str]:
    """With dashes and with underscores, plain and negated, without duplicates."""
    dashed = name.replace("_", "-")
    every = [f"--{dashed}", f"--{name}", f"--no-{dashed}", f"--no-{name}", f"--no_{name}"]
    return list(dict.fromkeys(every))


def _help_of(field: Field) -> str:
    default = (
        ""
        if field.default is None or (field.kind is bool and not field.default)
        else f" Default: {_shown(field)}."
    )
    return f"{field.help}{default} [env: {variable_of(field.name)}]".replace("%", "%%")


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
