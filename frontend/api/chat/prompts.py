"""Makes the prompt of a conversation: messages, tools and template variables, then the chat template."""

from collections.abc import Callable
from functools import partial
from typing import Any

from frontend.api.chat.conversation import Conversation
from frontend.api.chat.formats import GENERIC, ChatFormat, ChatFormats
from frontend.api.chat.generic_tools import with_tools, without_calls
from frontend.api.chat.messages import ASSISTANT, template_messages
from frontend.api.chat.template_options import template_options
from frontend.api.chat.tools import Tools, read_tools
from frontend.api.generation.prompts import Prompt
from frontend.errors import RequestError
from frontend.images.image_parts import ImageParts, ImageRules
from frontend.text.chat_encoder import EncodedChat
from frontend.text.reply_formats.base import ReplyFormat, ReplyOptions, ReplyParser
from frontend.text.template_reading import text_of

__all__ = ["ChatPrompts"]

_TEXT_ALONE = ImageRules("this model reads text alone")


class ChatPrompts:
    """Makes the prompts of all chat endpoints."""

    def __init__(self, formats: ChatFormats | None, lenient: bool, images: ImageRules = _TEXT_ALONE):
        """`formats` is None for a model without a chat template."""
        self._formats = formats
        self._lenient = lenient
        self._image_rules = images

    def prompt(self, conversation: Conversation, warnings: list[str], excess: int = 0) -> Prompt:
        """The prompt; `excess` as in `InputProcessor.encode`. Runs in any thread. Raises RequestError."""
        if self._formats is None:
            raise RequestError(
                "this model has no chat template: put chat_template.jinja into its directory, "
                "or use /v1/completions",
                param="messages",
            )
        chosen = self._formats.choose(conversation)
        try:
            tools = read_tools(conversation, chosen, self._lenient, warnings)
            images = ImageParts(self._image_rules)
            messages = self._messages(conversation, chosen, tools, warnings, images)
            options = template_options(
                conversation, chosen.encoder.template, chosen.reply, self._lenient, warnings
            )
            encoded = chosen.encoder.encode(
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
        reply_format = chosen.reply
        return Prompt(
            encoded.ids,
            text_of(last["content"]) if last["role"] == ASSISTANT else "",
            reply=_reply(reply_format, conversation, tools, encoded),
            reasoning=None if reply_format is None else reply_format.reasoning_ids(encoded.ids, encoded.end),
            constraint=tools.constraint,
            optional_calls=tools.optional_calls,
            frame=None if reply_format is None else reply_format.frame,
            sources=images.sources,
        )

    def _messages(
        self,
        conversation: Conversation,
        chosen: ChatFormat,
        tools: Tools,
        warnings: list[str],
        images: ImageParts,
    ) -> list[dict[str, Any]]:
        template = chosen.encoder.template
        turns = conversation.turns
        if chosen.tool_form == GENERIC:
            turns = with_tools(without_calls(turns), tools.described, template)
        return template_messages(turns, template, self._lenient, warnings, images)


def _reply(
    reply_format: ReplyFormat | None, conversation: Conversation, tools: Tools, encoded: EncodedChat
) -> Callable[[], ReplyParser] | None:
    """Makes the parsers of the replies; None if all text is content.

    With special tokens included and no tools, the text is returned as the model wrote it.
    """
    if reply_format is None or (conversation.raw_text and not tools.are_called):
        return None
    options = ReplyOptions(
        tools.schemas if tools.are_called else None,
        thinking=reply_format.ends_thinking(encoded.ids, encoded.end),
        parallel=conversation.parallel,
        enforced=tools.constraint is not None,
    )
    return partial(reply_format.parser, options) if reply_format.is_needed(options) else None
