"""Structural tags for xgrammar: schemas and regular expressions prepared, special tokens excluded."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from workers.grammar.json_schema import prepared
from workers.grammar.patterns import PatternError, full_match
from workers.grammar.python_arguments import MAX_WHITESPACE, python_arguments
from workers.grammar.schema_parts import Schema, SchemaError
from workers.grammar.vocabulary import SPECIAL_SIGN

__all__ = ["ANY_OBJECT", "MAX_WHITESPACE", "PreparedTag", "prepared_tag"]

PYTHON = "python"
"""The style of arguments that xgrammar does not know."""

ANY_OBJECT: Schema = {"type": "object", "additionalProperties": True}


@dataclass
class PreparedTag:
    """A structural tag, prepared for xgrammar."""

    tag: Any
    warnings: list[str] = field(default_factory=list)
    """What is not enforced."""
    _lenient: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """The JSON schemas that may become any object: the name of the tool, and the part of the tag."""

    _python: list[dict[str, Any]] = field(default_factory=list)
    """The parts that are arguments as in Python."""

    def add(self, tool: str, part: dict[str, Any], is_lenient: bool) -> None:
        """Prepare a part that has the parameters of `tool`. Raises SchemaError unless it `is_lenient`."""
        is_python = part.get("style") == PYTHON
        if is_python:
            self._python.append(part)
        try:
            part["json_schema"] = prepared(part.get("json_schema"))
            if is_python:
                python_arguments(part["json_schema"])
        except SchemaError as error:
            if not is_lenient:
                raise SchemaError(
                    f"the parameters of the tool {tool!r:.80}: {error.what}", error.path
                ) from None
            self._relax(tool, part, str(error))
        else:
            if is_lenient:
                self._lenient.append((tool, part))

    def for_xgrammar(self) -> Any:
        """The tag in the styles that xgrammar knows."""
        return self._known(self.tag, {id(part) for part in self._python})

    def _known(self, part: Any, python: set[int]) -> Any:
        if isinstance(part, list):
            return [self._known(each, python) for each in part]
        if not isinstance(part, dict):
            return part
        if id(part) in python:
            return python_arguments(part["json_schema"])
        return {
            name: value if name == "json_schema" else self._known(value, python)
            for name, value in part.items()
        }

    def relax(self, check: Callable[[Any], None]) -> bool:
        """Replace lenient schemas for which `check` raises RuntimeError; returns whether there are any."""
        failed = []
        for tool, part in self._lenient:
            try:
                check(part["json_schema"])
            except RuntimeError as error:
                failed.append((tool, part))
                self._relax(tool, part, str(error))
        self._lenient = [each for each in self._lenient if each not in failed]
        return bool(failed)

    def _relax(self, tool: str, part: dict[str, Any], reason: str) -> None:
        part["json_schema"] = dict(ANY_OBJECT)
        warning = f"the arguments of the tool {tool!r:.80} may be any object: {reason}"
        if warning not in self.warnings:  # a tool has a part for the first call, and one for further ones
            self.warnings.append(warning)


def prepared_tag(tag: Any, of_tools: bool = False) -> PreparedTag:
    """`tag`, decoded from JSON, for xgrammar.

    In a tag `of_tools`, a JSON schema may have `tool`, the name for error messages, and `lenient`: then one
    that cannot be enforced becomes any object. Raises SchemaError.
    """
    found = PreparedTag(tag)
    for part in _parts(tag):
        _exclude_special(part)
        if part.get("type") == "regex":
            _prepare_regex(part)
        if part.get("type") != "json_schema":
            continue
        part.setdefault("max_whitespace_cnt", MAX_WHITESPACE)
        if of_tools and "tool" in part:
            found.add(part.pop("tool"), part, part.pop("lenient"))
        else:
            part["json_schema"] = prepared(part.get("json_schema"))
    return found


def _parts(tag: Any) -> Iterator[dict[str, Any]]:
    """All objects in the tag, but those in JSON schemas."""
    waiting = [tag]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += reversed(part)
        if isinstance(part, dict):
            yield part
            waiting += reversed([value for name, value in part.items() if name != "json_schema"])


def _prepare_regex(part: dict[str, Any]) -> None:
    if isinstance(pattern := part.get("pattern"), str):
        try:
            part["pattern"] = full_match(pattern)
        except PatternError as error:
            raise SchemaError(f"the regular expression cannot be used: {error}", "'regex'") from None


def _exclude_special(part: dict[str, Any]) -> None:
    """Exclude special tokens from a part of a structural tag in which xgrammar would allow them."""
    if part.get("type") == "qwen_xml_parameter":  # its older name
        part |= {"type": "json_schema", "style": "qwen_xml"}
    is_free = (
        part.get("type") in ("any_text", "dispatch", "triggered_tags") or part.get("style", "json") != "json"
    )
    if is_free and isinstance(excludes := part.get("excludes", []), list):
        part["excludes"] = [*excludes, SPECIAL_SIGN]
