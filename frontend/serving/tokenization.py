"""Tokenize and detokenize without generating."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from frontend.errors import RequestError
from frontend.input_processor import InputProcessor
from frontend.schemas.chat import ChatRequest
from frontend.schemas.tokenization import (
    DETOKENIZE,
    TOKENIZE,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from frontend.serving.chat import ChatService
from frontend.serving.models import ModelService
from frontend.tokenizer import Tokenizer

__all__ = ["TokenizationService"]

T = TypeVar("T")

_CHAT_FIELDS = ("messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


class TokenizationService:
    """POST /tokenize and /detokenize. The engine is not involved."""

    def __init__(
        self, inputs: InputProcessor, models: ModelService, chat: ChatService, threads: ThreadPoolExecutor
    ):
        self._inputs = inputs
        self._models = models
        self._chat = chat
        self._threads = threads

    async def tokenize(self, body: bytes) -> TokenizeResponse:
        """Token ids of a text or a conversation. Raises RequestError for an invalid body."""
        request, _ = TOKENIZE.decode(body, lenient=False)
        self._models.check(request.model)
        ids = await self._off_loop(lambda: self._ids(request))
        return TokenizeResponse(
            count=len(ids),
            max_model_len=self._inputs.max_model_len,
            tokens=ids,
            token_strs=[self._tokenizer().token_text(i) for i in ids] if request.return_token_strs else None,
        )

    async def detokenize(self, body: bytes) -> DetokenizeResponse:
        """The text of ids. Raises RequestError for ids outside the vocabulary."""
        request, _ = DETOKENIZE.decode(body, lenient=False)
        self._models.check(request.model)
        tokenizer = self._tokenizer()
        if request.tokens:
            self._inputs.check_vocabulary(request.tokens, "tokens")
        text = await self._off_loop(lambda: tokenizer.decode(request.tokens, skip_special_tokens=False))
        return DetokenizeResponse(text)

    def _ids(self, request: TokenizeRequest) -> list[int]:
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("send either 'prompt' or 'messages'", param="prompt")
        if request.prompt is None:
            chat = ChatRequest(**{name: getattr(request, name) for name in _CHAT_FIELDS})
            return self._chat.prompt_ids(chat, bool(request.add_special_tokens))
        for name in _CHAT_FIELDS:
            if getattr(request, name) is not None:
                raise RequestError(f"'{name}' belongs to 'messages', not to 'prompt'", param=name)
        return self._inputs.encode(request.prompt, request.add_special_tokens is not False)

    def _tokenizer(self) -> Tokenizer:
        if self._inputs.tokenizer is None:
            raise RequestError("this model has no tokenizer: it accepts and returns token ids only")
        return self._inputs.tokenizer

    async def _off_loop(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
