"""The parser of command lines: errors on one line, help by topic, completion scripts."""

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import Any, NoReturn

__all__ = ["SHELLS", "CommandLineParser", "PrintCompletion", "complete_paths"]

_BAD_COMMAND_LINE = 2
SHELLS = ("bash", "zsh", "tcsh", "fish")
# The function of each shell that completes paths.
_COMPLETE_PATHS = {
    "bash": "_shtab_compgen_files",
    "zsh": "_files",
    "tcsh": "f",
    "fish": "(__fish_complete_path (commandline -ct))",
}
_WIDTH = 110
_EVERYTHING = "all"


class CommandLineParser(argparse.ArgumentParser):
    """Prints errors on one line with exit status 2, and has `--help TOPIC`.

    `common` names the flags that `--help` alone shows; without them it shows all, as `--help all` does.
    """

    def __init__(self, common: Sequence[str] = (), **options: Any):
        super().__init__(allow_abbrev=False, add_help=False, **options)
        self._common = common
        self.add_argument(
            "-h",
            "--help",
            action=_Help,
            nargs="?",
            metavar="TOPIC",
            help="Show the commonest flags; or all, those of a group, or those that mention a word.",
        )

    def format_common(self) -> str:
        """The commonest flags, and how to see the others."""
        by_flag = {flag: action for action in self._actions for flag in action.option_strings}
        actions = [by_flag[flag] for flag in self._common]
        heads = [", ".join(_shown(action)) for action in actions]
        width = max(map(len, heads)) + 2
        lines = [
            f"  {head:<{width}}{_first_sentence(action.help or '')}"[:_WIDTH].rstrip()
            for head, action in zip(heads, actions, strict=True)
        ]
        count = sum(action.help != argparse.SUPPRESS for action in self._actions)
        rest = [
            f"{self.prog} --help all    all {count} flags",
            f"{self.prog} --help WORD   those that mention a word (--help graph), or one group of:",
            f"  {', '.join(self.groups())}",
        ]
        return "\n".join([f"usage: {self.usage}", self.description or "", *lines, *rest]) + "\n"

    def format_topic(self, topic: str) -> str:
        """Help on the group `topic`, or else on the flags that mention the word; empty if there are none."""
        word = topic.lstrip("-").replace("_", "-").lower()
        if word == _EVERYTHING:
            return self.format_help()
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
        shown = [group for group in self._action_groups if any(map(_is_shown, group._group_actions))]
        return [group.title or "" for group in shown]

    def error(self, message: str) -> NoReturn:
        """Print `error: …` and exit."""
        self.exit(_BAD_COMMAND_LINE, f"error: {message.removeprefix('argument ')}\n")

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """As argparse; the error for an unknown flag names the nearest known one."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            if getattr(parsed, "model", None) == "serve":  # as `vllm serve MODEL`
                self.error(f"unexpected argument {unknown[0]!r}: give the model without 'serve' before it")
            self.error(self._unknown(unknown[0]))
        return parsed

    def print_brief(self) -> None:
        """What `--help` alone prints."""
        print(self.format_common() if self._common else self.format_help(), end="")

    def _unknown(self, argument: str) -> str:
        name = argument.partition("=")[0].replace("_", "-")
        if not name.startswith("-"):
            return f"unexpected argument {argument!r}: all settings are flags, see --help"
        flags = [
            flag
            for action in self._actions
            if action.help != argparse.SUPPRESS
            for flag in action.option_strings
        ]
        near = difflib.get_close_matches(name, flags, n=1)
        return f"unknown flag {argument}: " + (f"did you mean {near[0]}?" if near else "see --help")


def complete_paths(action: argparse.Action) -> None:
    """Let shells complete the value of a flag as a path."""
    action.complete = _COMPLETE_PATHS  # type: ignore[attr-defined]


class PrintCompletion(argparse.Action):
    """Prints the completion script of a shell, and exits."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        import shtab

        print(shtab.complete(parser, values))
        parser.exit()


class _Help(argparse.Action):
    """`--help`, `--help all`, `--help GROUP` and `--help WORD`."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if values is None:
            parser.print_brief()
            parser.exit()
        text = parser.format_topic(values)
        if not text:
            groups = ", ".join(parser.groups())
            parser.error(f"--help {values}: no flag mentions it; the groups are {groups}")
        print(text, end="")
        parser.exit()


def _is_shown(action: argparse.Action) -> bool:
    return action.help != argparse.SUPPRESS


def _shown(action: argparse.Action) -> list[str]:
    """The shortest spelling, and the one in full."""
    return list(dict.fromkeys((min(action.option_strings, key=len), action.option_strings[0])))


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[^.]{3})[.:;](?:\s|$)", text.replace("%%", "%"), maxsplit=1)[0]


def _mentions(action: argparse.Action, word: str) -> bool:
    """Whether a word in the names or the help of a flag starts with `word`."""
    text = " ".join([*action.option_strings, action.help or ""]).lower()
    return re.search(r"(?<![a-z0-9])" + re.escape(word), text) is not None
