"""The chat templates of a model, each with the format of the replies to its prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

from frontend.api.chat.conversation import Conversation
from frontend.api.chat.messages import Turn
from frontend.api.models.schema import ToolForm
from frontend.text.chat_encoder import ChatEncoder
from frontend.text.reply_formats.base import ReplyFormat

__all__ = ["GENERIC", "ChatFormat", "ChatFormats"]

GENERIC: ToolForm = "generic"


@dataclass(frozen=True)
class ChatFormat:
    """One template and its replies."""

    encoder: ChatEncoder
    reply: ReplyFormat | None

    @property
    def tool_problem(self) -> str:
        """Why no tools can be offered; empty if they can."""
        if self.reply is not None and self.reply.describes_tools:
            return ""
        if not self.encoder.template.reads_tools:
            return (
                "this model's chat template does not read tools: --chat-template sets another one, and "
                "--tool-call-parser generic describes them in the system message"
            )
        if self.reply is None or not self.reply.parses_calls:
            return "the format of this model's tool calls is not known: --tool-call-parser names it"
        return ""

    @property
    def tool_form(self) -> ToolForm | None:
        """Who tells the model of tools; None: they are refused."""
        if self.tool_problem:
            return None
        return "generic" if self.reply is not None and self.reply.describes_tools else "template"


@dataclass(frozen=True)
class ChatFormats:
    """The formats of one model."""

    plain: ChatFormat
    with_tools: ChatFormat
    """For conversations with tools, also earlier ones."""

    @property
    def tool_form(self) -> ToolForm | None:
        """Who tells the model of tools; None: they are refused."""
        return self.with_tools.tool_form

    def choose(self, conversation: Conversation) -> ChatFormat:
        """The format for a conversation."""
        has_tools = bool(conversation.functions) or _used_tools(conversation.turns)
        return self.with_tools if has_tools else self.plain


def _used_tools(turns: Sequence[Turn]) -> bool:
    return any(message.tool_calls or message.role == "tool" for _, message in turns)
