"""Token ids of a conversation: chat template, then tokenizer."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from frontend.text.chat_template import ChatTemplate
from frontend.text.control_tokens import ControlTokens
from frontend.text.input_processor import InputProcessor

__all__ = ["ChatEncoder", "EncodedChat"]

_END_CHARS = 256


class EncodedChat(NamedTuple):
    """The prompt of a conversation."""

    ids: list[int]
    end: str
    """The end of its text."""


class ChatEncoder:
    """Encodes conversations for one model.

    Texts of messages, tools and options never become control tokens, unless `allow_control_tokens`.
    """

    def __init__(
        self,
        template: ChatTemplate,
        inputs: InputProcessor,
        allow_control_tokens: bool = False,
        image_texts: tuple[str, str] = ("", ""),
    ):
        """`image_texts`: what the template writes for an image, and what a prompt gets instead."""
        self.template = template
        self._image_texts = image_texts
        self._inputs = inputs
        self._control: ControlTokens | None = None
        if inputs.tokenizer is not None and not allow_control_tokens:
            self._control = ControlTokens(inputs.tokenizer, template.source)

    def encode(
        self,
        messages: list[dict[str, Any]],
        options: Mapping[str, Any],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        excess: int = 0,
    ) -> EncodedChat:
        """The prompt of `messages`; `excess` as in `InputProcessor.encode`.

        Raises RequestError if the template refuses the conversation, and for too many tokens.
        """
        tokenizer = None
        if self._control is not None:
            messages, marked = self._control.mark(messages)
            options, marked_options = self._control.mark_value(options)
            tools, marked_tools = self._control.mark_value(tools)
            tokenizer = self._control.tokenizer if marked or marked_options or marked_tools else None
        if continue_final_message:
            text = self.template.render_continued(messages, options, tools)
        else:
            text = self.template.render(messages, options, add_generation_prompt, tools)
        if self._image_texts[0]:
            text = text.replace(*self._image_texts)
        return EncodedChat(
            self._inputs.encode(text, add_special_tokens, excess, tokenizer), text[-_END_CHARS:]
        )
