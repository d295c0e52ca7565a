"""Makes the prompt of a conversation: messages, tools and template variables, then the chat template."""

from collections.abc import Callable
from functools import partial

from frontend.api.chat.conversation import Conversation
from frontend.api.chat.messages import ASSISTANT, template_messages
from frontend.api.chat.template_options import template_options
from frontend.api.chat.tools import Tools, read_tools
from frontend.api.generation.prompts import Prompt
from frontend.errors import RequestError
from frontend.text.chat_encoder import ChatEncoder, EncodedChat
from frontend.text.reply_formats.base import ReplyFormat, ReplyOptions, ReplyParser

__all__ = ["ChatPrompts"]


class ChatPrompts:
    """Makes the prompts of all chat endpoints."""

    def __init__(self, encoder: ChatEncoder | None, reply_format: ReplyFormat | None, lenient: bool):
        self._encoder = encoder
        self._format = reply_format
        self._lenient = lenient

    def prompt(self, conversation: Conversation, warnings: list[str], excess: int = 0) -> Prompt:
        """The prompt; `excess` as in `InputProcessor.encode`. Runs in any thread. Raises RequestError."""
        encoder = self._encoder
        if encoder is None:
            raise RequestError(
                "this model has no chat template: put chat_template.jinja into its directory, "
                "or use /v1/completions",
                param="messages",
            )
        template = encoder.template
        lenient = self._lenient
        try:
            messages = template_messages(conversation.turns, template.source, lenient, warnings)
            options = template_options(conversation, template, self._format, lenient, warnings)
            tools = read_tools(conversation, template.source, self._format, lenient, warnings)
            encoded = encoder.encode(
                messages,
                options,
                tools=tools.shown,
                add_generation_prompt=conversation.add_generation_prompt,
                continue_final_message=conversation.continue_final_message,
                add_special_tokens=conversation.add_special_tokens,
                excess=excess,
            )
        except RecursionError:
            raise RequestError(
                "the messages, tools or template options are nested too deeply", "messages"
            ) from None
        last = messages[-1]
        echo = (last["content"] or "") if last["role"] == ASSISTANT else ""
        reasoning = None if self._format is None else self._format.reasoning_ids(encoded.ids, encoded.end)
        return Prompt(
            encoded.ids,
            echo,
            reply=self._reply(conversation, tools, encoded),
            reasoning=reasoning,
            constraint=tools.constraint,
            optional_calls=tools.optional_calls,
            frame=None if self._format is None else self._format.frame,
        )

    def _reply(
        self, conversation: Conversation, tools: Tools, encoded: EncodedChat
    ) -> Callable[[], ReplyParser] | None:
        """Makes the parsers of the replies; None if all text is content.

        With special tokens included and no tools, the text is returned as the model wrote it.
        """
        reply_format = self._format
        if reply_format is None or (conversation.raw_text and not tools.are_called):
            return None
        options = ReplyOptions(
            tools.schemas if tools.are_called else None,
            thinking=reply_format.ends_thinking(encoded.ids, encoded.end),
            parallel=conversation.parallel,
            enforced=tools.constraint is not None,
        )
        return partial(reply_format.parser, options) if reply_format.is_needed(options) else None
