"""What a chat template reads of a conversation, found by rendering.

A word that stands in no template is given as the text of a message, or as the name of a tool, and looked
for in the prompt. A template that refuses all probes is taken to read texts that are strings.
"""

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

from frontend.errors import RequestError

__all__ = ["ContentForm", "TemplateReading", "text_of"]

Messages = list[dict[str, Any]]
Render = Callable[[Messages, list[dict[str, Any]] | None], str]
"""Makes the prompt of messages and tools. Raises RequestError where the template refuses them."""

_FIRST = "Kestrel4711"
_SECOND = "Plover0815"
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _FIRST,
        "description": "A function",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "A place"}},
            "required": ["place"],
        },
    },
}
_CALL_ID = "probe4711"  # nine letters and digits: some templates take no other ids


class ContentForm(Enum):
    """The form of a message's content in which a template loses no text."""

    STRING = "string"
    PARTS = "parts"
    """A list of parts."""
    ONE_PART = "one part"
    """A list of which the template reads the first part only."""
    EITHER = "either"
    """A string or a list of parts."""
    NONE = "none"
    """The template writes no text of this role."""

    def of(self, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        """`content` in this form, unless it has parts of other types than text."""
        if isinstance(content, list) and any(part.get("type") != "text" for part in content):
            return content
        match self:
            case ContentForm.PARTS | ContentForm.EITHER if isinstance(content, list):
                return content
            case ContentForm.PARTS | ContentForm.ONE_PART:
                return [_part(text_of(content))]
        return text_of(content)


class TemplateReading:
    """Facts about one template; each is found when it is first asked for."""

    def __init__(self, render: Render):
        self._render = render
        self._forms: dict[str, ContentForm] = {}
        self._shown: dict[str, bool] = {}

    def form(self, role: str) -> ContentForm:
        """The form of the contents of messages with this role."""
        if role not in self._forms:
            self._forms[role] = self._find_form(role)
        return self._forms[role]

    def shows(self, role: str) -> bool:
        """Whether the template takes messages of this role, and writes their texts."""
        if role not in self._shown:
            prompt = self._first_prompt(role, self.form(role).of(_FIRST))
            self._shown[role] = prompt is not None and _FIRST in prompt
        return self._shown[role]

    def reads_tools(self) -> bool | None:
        """Whether tools are part of the prompt; None if the template refuses the probes."""
        prompts = [self._prompt(before, [_TOOL]) for before in self._conversations("user", "Hello")]
        made = [prompt for prompt in prompts if prompt is not None]
        return any(_FIRST in prompt for prompt in made) if made else None

    def _find_form(self, role: str) -> ContentForm:
        string = self._first_prompt(role, _FIRST)
        if string is not None and _FIRST in string:
            one, two = self._part_prompts(role)
            reads_both = one == string and two is not None and _FIRST in two and _SECOND in two
            return ContentForm.EITHER if reads_both else ContentForm.STRING
        one, two = self._part_prompts(role)
        if two is not None and _FIRST in two and _SECOND in two:
            return ContentForm.PARTS
        if one is not None and _FIRST in one:
            return ContentForm.ONE_PART
        refused = string is None
        return ContentForm.STRING if refused else ContentForm.NONE

    def _part_prompts(self, role: str) -> tuple[str | None, str | None]:
        """The prompts of one part, and of two."""
        first, second = _part(_FIRST), _part(_SECOND)
        return self._first_prompt(role, [first]), self._first_prompt(role, [first, second])

    def _first_prompt(self, role: str, content: str | list[dict[str, Any]]) -> str | None:
        """The first prompt with the text, else the first one; None: the template refuses all probes."""
        prompts = (self._prompt(messages, None) for messages in self._conversations(role, content))
        made = [prompt for prompt in prompts if prompt is not None]
        return next((prompt for prompt in made if _FIRST in prompt), made[0] if made else None)

    def _prompt(self, messages: Messages, tools: list[dict[str, Any]] | None) -> str | None:
        try:
            return self._render(messages, tools)
        except RequestError:
            return None

    def _conversations(self, role: str, content: str | list[dict[str, Any]]) -> Iterator[Messages]:
        """Conversations with a message of `role`, the most common one first."""
        probe = {"role": role, "content": content}
        if role == "user":
            yield [probe]
            yield [{"role": "system", "content": "Be brief."}, probe]
            return
        user = {"role": "user", "content": self.form("user").of("Hello")}
        if role == "assistant":
            yield [user, probe, user]
            yield [user, probe]
        elif role in ("system", "developer"):
            yield [probe, user]
        else:
            silent = self.form("assistant").of("")
            for arguments in ({"place": "x"}, '{"place": "x"}'):
                call = {
                    "id": _CALL_ID,
                    "type": "function",
                    "function": {"name": "find", "arguments": arguments},
                }
                asked = {"role": "assistant", "content": silent, "tool_calls": [call]}
                yield [user, asked, {**probe, "tool_call_id": _CALL_ID, "name": "find"}]


def text_of(content: str | list[dict[str, Any]] | None) -> str:
    """The text of a message's content; parts are lines."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""


def _part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
