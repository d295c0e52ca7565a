"""Command line and keyword arguments, built from the configuration classes.

Every flag is accepted with dashes and with underscores, and has a variable and a key in the
file of --config (see `sources`). `explicit_fields` distinguishes values that the user set from
defaults, so that a setting without effect can be reported.
"""

import argparse
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from atom.shared.config.engine import EngineConfig
from atom.shared.config.fields import NAMES, ConfigError, Field, fields_of, names_text
from atom.shared.config.images import media_domains
from atom.shared.config.launchers import launcher_settings
from atom.shared.config.nodes import NodesConfig
from atom.shared.config.not_yet import REFUSED, refusal
from atom.shared.config.other_engines import OtherFlag, Takes, other_flags, setting_advice
from atom.shared.config.parser import SHELLS, CommandLineParser, PrintCompletion, complete_paths
from atom.shared.config.server import ServerConfig
from atom.shared.config.sources import CONFIG_VARIABLE, environment_values, file_values, variable_of

__all__ = [
    "COMMON_FLAGS",
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
    "notes_of",
    "server_config_from",
    "with_environment",
    "with_http_port",
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
_NOTES = "_notes"
_ARGUMENT = "_model_argument"
COMMON_FLAGS = (
    *("--model", "--served-model-name", "--host", "--server-port", "--api-key", "--device", "--dtype"),
    *("--tensor-parallel-size", "--data-parallel-size", "--max-model-len", "--max-num-seqs"),
    *("--gpu-memory-utilization", "--kv-cache-memory-bytes", "--kv-cache-dtype"),
    *("--chat-template", "--log-level", "--plan", "--config"),
)
"""What `atom-launch --help` shows first."""
# Fields that a shell completes as paths.
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
    """Add the model without a flag, --config, --plan, --json, --print-completion and other engines' flags.

    To be called last: a flag that the parser has already is not another engine's.
    """
    model = parser.add_argument(
        "model", nargs="?", action=_Model, default=argparse.SUPPRESS, metavar="MODEL", help=argparse.SUPPRESS
    )
    complete_paths(model)
    config = parser.add_argument(
        "--config", metavar="FILE", help=f"YAML file with one key per flag. [env: {CONFIG_VARIABLE}]"
    )
    complete_paths(config)
    parser.add_argument(
        "--plan",
        nargs="?",
        const="",
        metavar="GPUS",
        help="Show the memory that the model needs, without loading it, and exit: on this host, or on "
        "assumed GPUs (8x80: eight of 80 GiB).",
    )
    replay = parser.add_argument(
        "--replay-file",
        metavar="FILE",
        help="Run the requests of a flight record, which an engine has written at its end, again offline, "
        "say what happens, and exit.",
    )
    complete_paths(replay)
    parser.add_argument("--json", action="store_true", help="With --plan: print JSON.")
    parser.add_argument(
        "--print-completion",
        action=PrintCompletion,
        choices=SHELLS,
        help="Print a completion script for this shell and exit.",
    )
    _add_other_flags(parser)


def _add_other_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of other engines, with dashes and underscores; --help does not show them."""
    known = parser._option_string_actions
    for name, (engine, flag) in other_flags().items():
        spellings = {name, "--" + name[2:].replace("-", "_")} if name.startswith("--") else {name}
        if new := sorted(spellings - known.keys()):
            nargs = {None: "?", Takes.NOTHING: 0, Takes.A_VALUE: None}[flag.accepted]
            dest = "_other" + name.replace("-", "_")
            parser.add_argument(
                *new,
                dest=dest,
                action=_Other,
                engine=engine,
                flag=flag,
                nargs=nargs,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
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


def with_http_port(namespace: argparse.Namespace) -> argparse.Namespace:
    """The namespace, with --port as the HTTP port on one node where no --server-port is given.

    Other engines' scripts mean the HTTP port, and on one node there are no other ports.
    """
    given = explicit_fields(namespace)
    if "port" not in given or "server_port" in given or namespace.nnodes > 1:
        return namespace
    notes = [*notes_of(namespace), f"--port {namespace.port} is the HTTP port here, as is --server-port"]
    values = {"server_port": namespace.port, "port": None, _NOTES: notes}
    values[_EXPLICIT] = given - {"port"} | {"server_port"}
    return argparse.Namespace(**{**vars(namespace), **values})


def notes_of(namespace: argparse.Namespace) -> list[str]:
    """Log lines about accepted flags that mean something else or nothing here."""
    return list(getattr(namespace, _NOTES, ()))


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
    config = _build(ServerConfig, vars(namespace))
    media_domains(config.allowed_media_domains)  # raises for one that is no host
    return config


def engine_config_from_kwargs(**options: Any) -> EngineConfig:
    """The engine configuration of keyword arguments named like the fields.

    Raises TypeError for an unknown name, ConfigError for an invalid value.
    """
    known = [field.name for concern in _concerns() for field in fields_of(concern)]
    for name, value in options.items():
        if name in REFUSED and (reason := refusal(name, value)):
            raise ConfigError(f"{name}={value!r}: {reason}")
        if name not in known and name not in REFUSED:
            advice = setting_advice(name) or f"known settings: {', '.join(sorted(known))}"
            raise TypeError(f"unknown setting {name!r}; {advice}")
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
        if self.dest == "model" and hasattr(namespace, _ARGUMENT):  # of several --model the last holds
            raise argparse.ArgumentError(None, _two_models(namespace.model, values))
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
        try:
            reason = refusal(self.dest, not negated if bare else values)
        except ConfigError as error:
            reason = str(error)
        if reason:
            raise argparse.ArgumentError(None, f"{option_string}: {reason}")


class _Model(argparse.Action):
    """The model without a flag, as other servers take it."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if self.dest in explicit_fields(namespace):
            raise argparse.ArgumentError(None, _two_models(namespace.model, values))
        _note_explicit(namespace, self.dest)
        namespace.model = vars(namespace)[_ARGUMENT] = values


class _Other(argparse.Action):
    """A flag of another engine: refused with what to use, or noted as without effect."""

    def __init__(self, *args: Any, engine: str, flag: OtherFlag, **options: Any):
        super().__init__(*args, **options)
        self._engine = engine
        self._flag = flag

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        flag = self._flag
        given = " ".join([option_string or "", *([values] if isinstance(values, str) else [])])
        if flag.accepted is None or (flag.values and values not in flag.values):
            raise argparse.ArgumentError(None, f"{given} is a flag of {self._engine}: {flag.advice}")
        notes = vars(namespace).setdefault(_NOTES, [])
        notes.append(f"{given} has no effect, it is a flag of {self._engine}: {flag.advice}")


def _two_models(first: str, second: str) -> str:
    return f"two models are given, {first!r} and {second!r}: name one"


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
        complete_paths(action)


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
