"""Variables of the chat template that clients set."""

from typing import Any

import msgspec

from frontend.api.chat.conversation import Conversation
from frontend.errors import RequestError
from frontend.text.chat_template import ChatTemplate
from frontend.text.reply_formats.base import ReplyFormat

__all__ = ["template_options"]

_MAX_BYTES = 64 * 1024
_EFFORT = "reasoning_effort"
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_OFF = "none"
# Families name the switch of reasoning differently.
_SWITCHES = ("enable_thinking", "thinking")


def template_options(
    conversation: Conversation,
    template: ChatTemplate,
    reply_format: ReplyFormat | None,
    lenient: bool,
    warnings: list[str],
) -> dict[str, Any]:
    """The variables for `template`. Raises RequestError for one that it does not read.

    `enable_thinking` and `thinking` stand for one another, and where the template has no reasoning_effort,
    that switches reasoning off (`none`) or on.
    """
    given = conversation.template_kwargs
    if (size := len(msgspec.json.encode(given))) > _MAX_BYTES:
        raise RequestError(
            f"'chat_template_kwargs' has {size} bytes, at most {_MAX_BYTES} are allowed",
            param="chat_template_kwargs",
        )
    options = {}
    unread = []
    switch = next((name for name in _SWITCHES if name in template.options), None)
    for name, value in given.items():
        if name in template.options:
            options[name] = value
        elif name in _SWITCHES and switch is not None:
            options.setdefault(switch, value)
        elif name not in _SWITCHES or value is not False or _reasons(reply_format):
            unread.append(f"chat_template_kwargs.{name}")
    effort = conversation.effort
    if effort is not None:
        _check_effort(effort, reply_format)
        if _EFFORT in template.options:
            options[_EFFORT] = effort
        if switch is not None:
            options.setdefault(switch, effort != _OFF)
        elif _EFFORT not in template.options and (effort != _OFF or _reasons(reply_format)):
            unread.append(_EFFORT)
    if (names := conversation.option_fields) is not None:
        unread = [names.get(field, field) for field in unread]
        lenient = True
    _refuse(unread, template, lenient, warnings)
    return options


def _reasons(reply_format: ReplyFormat | None) -> bool:
    return reply_format is not None and reply_format.separates_reasoning


def _check_effort(effort: str, reply_format: ReplyFormat | None) -> None:
    known = (reply_format and reply_format.efforts) or _EFFORTS
    if effort not in known:
        raise RequestError(
            f"'reasoning_effort' must be one of {', '.join(known)}, not {effort!r:.40}", param=_EFFORT
        )


def _refuse(unread: list[str], template: ChatTemplate, lenient: bool, warnings: list[str]) -> None:
    if unread and not lenient:
        readable = ", ".join(sorted(template.options)) or "no variables"
        raise RequestError(
            f"'{unread[0]}' has no effect: this model's chat template reads {readable}",
            param=unread[0],
            code="unsupported_parameter",
        )
    warnings += [f"'{field}' is not read by the chat template and was left out" for field in unread]
