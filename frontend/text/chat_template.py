"""Renders a conversation with the checkpoint's Jinja chat template.

Contents are given as text or as parts of type text; the template gets them in the form that it reads.
Templates are never taken from requests, and run in Jinja's sandbox.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from atom.shared.config.checkpoint import Checkpoint
from frontend.errors import RequestError
from frontend.text.template_reading import ContentForm, TemplateReading
from frontend.text.template_source import TemplateSource

__all__ = ["ChatTemplate"]

_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
_TOOLS = "tools"
_XML_TOOLS = "xml_tools"
"""SmolLM3's, of functions in place of tools."""
# Private-use characters that mark the end of the message to be continued.
_MARK = "\ue0c7\uf8a3"
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})


class ChatTemplate:
    """One compiled template and the special tokens that it may use."""

    def __init__(self, source: str, tokens: Mapping[str, str]):
        """Raises ValueError for a template that does not compile."""
        try:
            environment = _environment()
            self._template = environment.from_string(source)
            tree = environment.parse(source)
            read = meta.find_undeclared_variables(tree)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is broken in line {error.lineno}: {error}") from error
        self.source = TemplateSource(tree)
        self._tokens = dict(tokens)
        self.options = frozenset(read - _RESERVED - tokens.keys())
        """The variables that clients may set: all that the template reads except the server's."""

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> "ChatTemplate | None":
        """None for a checkpoint without a template. Raises ValueError for an unusable one."""
        if checkpoint.chat_template_file is None:
            return None
        return cls.from_file(Path(checkpoint.chat_template_file), checkpoint.template_tokens)

    @classmethod
    def tools_from_checkpoint(cls, checkpoint: Checkpoint) -> "ChatTemplate | None":
        """The template for conversations with tools; None if there is no such one."""
        if checkpoint.tool_template_file is None:
            return None
        return cls.from_file(Path(checkpoint.tool_template_file), checkpoint.template_tokens)

    @classmethod
    def from_file(cls, path: Path, tokens: Mapping[str, str]) -> "ChatTemplate":
        """Raises OSError, and ValueError for a template that does not compile or loses the user's text."""
        template = cls(path.read_text(encoding="utf-8"), tokens)
        if template.reading.form("user") is ContentForm.NONE:
            raise ValueError(
                f"the chat template {path} leaves out the text of user messages, whether it is a string or "
                "a list of parts: mend it, or set another one with --chat-template"
            )
        return template

    @cached_property
    def reading(self) -> TemplateReading:
        """What the template reads, without the client's variables."""
        return TemplateReading(lambda messages, tools: self._render(messages, {}, True, tools))

    @cached_property
    def reads_tools(self) -> bool:
        """Whether the template tells the model of tools."""
        found = self.reading.reads_tools() if self._tools_name is not None else False
        return True if found is None else found

    @cached_property
    def _tools_name(self) -> str | None:
        """The variable with the tools; None: the template reads no such one."""
        return next((name for name in (_TOOLS, _XML_TOOLS) if self.source.reads_variable(name)), None)

    def render(
        self,
        messages: list[dict[str, Any]],
        options: Mapping[str, Any],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """The prompt text, with the beginning of an assistant message if `add_generation_prompt`.

        `tools` are offered functions, and `options` the client's variables. Raises RequestError for one
        that is not in `self.options`, and with the template's message if it refuses the conversation.
        """
        if unread := sorted(options.keys() - self.options):
            taken = [name for name in unread if name in _RESERVED.union(self._tokens)]
            problem = "cannot be set" if taken else "not read by the template"
            raise RequestError(
                f"chat template options: {', '.join(taken or unread)} {problem}", param="chat_template_kwargs"
            )
        return self._render([self._in_form(each) for each in messages], options, add_generation_prompt, tools)

    def _in_form(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message with its content in the form that the template reads."""
        content = message.get("content")
        if content is None:
            return message
        return {**message, "content": self.reading.form(message["role"]).of(content)}

    def _render(
        self,
        messages: list[dict[str, Any]],
        options: Mapping[str, Any],
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None,
    ) -> str:
        variables = {**self._tokens, **options, "messages": messages}
        if tools is not None and self._tools_name == _XML_TOOLS:
            variables.setdefault(_XML_TOOLS, [tool["function"] for tool in tools])
        try:
            return self._template.render(
                variables, tools=tools, documents=None, add_generation_prompt=add_generation_prompt
            )
        except _TEMPLATE_ERRORS as error:
            raise RequestError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error

    def render_continued(
        self,
        messages: list[dict[str, Any]],
        options: Mapping[str, Any],
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """The prompt text up to the end of the last message's content, which the model continues."""
        last = messages[-1]
        marked = [*messages[:-1], {**last, "content": _marked(last["content"])}]
        before, mark, after = self.render(marked, options, False, tools).rpartition(_MARK)
        if not mark:
            raise RequestError(
                "the chat template leaves out the last message: it cannot be continued",
                param="continue_final_message",
            )
        # A template that trims contents removes the space after the mark: then trim the content too.
        return before if after.startswith(" ") else before.rstrip()


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks training text; here it renders its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _in_call_order(
    results: Iterable[Mapping[str, Any]], calls: Iterable[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Results of tools in the order of the calls that they answer; one that answers none is as of the first.

    For our own templates: Jinja alone cannot do it in linear time.
    """
    places = {call.get("id"): place for place, call in enumerate(calls)}
    return sorted(results, key=lambda result: places.get(result.get("tool_call_id"), 0))


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
    )
    environment.filters["tojson"] = _tojson
    environment.filters["in_call_order"] = _in_call_order
    helpers: dict[str, Callable[[str], str]] = {
        "raise_exception": _raise,
        "strftime_now": lambda layout: datetime.now().strftime(layout),
    }
    environment.globals.update(helpers)
    return environment


def _tojson(value: Any, **layout: Any) -> str:
    # Jinja's own filter escapes for HTML and ASCII; models are not trained on that.
    layout.setdefault("ensure_ascii", False)
    return json.dumps(value, **layout)


def _marked(content: str | list[dict[str, Any]] | None) -> str | list[dict[str, Any]]:
    """`content` with a mark at its end."""
    if isinstance(content, list):
        return [*content[:-1], {**content[-1], "text": f"{content[-1]['text']}{_MARK} "}]
    return f"{content}{_MARK} "


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
