"""Tokenize and detokenize without generating."""

from collections.abc import Callable

import msgspec

from frontend.api.chat.endpoint import ChatEndpoint
from frontend.api.chat.schema import ChatRequest
from frontend.api.generation.prompt_images import PromptImages
from frontend.api.generation.prompts import Prompt
from frontend.api.messages.endpoint import MessagesEndpoint
from frontend.api.messages.schema import CountResponse
from frontend.api.models.service import ModelService
from frontend.api.responses.endpoint import ResponsesEndpoint
from frontend.api.responses.schema import InputTokens
from frontend.api.tokenization.schema import (
    DETOKENIZE,
    TOKENIZE,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from frontend.errors import RequestError
from frontend.text.detokenizer import decode
from frontend.text.input_processor import MAX_EXCESS_TOKENS, InputProcessor
from frontend.text.text_executor import TextExecutor
from frontend.text.tokenizer import Tokenizer

__all__ = ["TokenizationService"]

_CHAT_FIELDS = (
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "tools",
)


class TokenizationService:
    """The routes that only tokenize, with JSON in and out. The engine is not involved."""

    def __init__(
        self,
        inputs: InputProcessor,
        models: ModelService,
        chat: ChatEndpoint,
        messages: MessagesEndpoint,
        responses: ResponsesEndpoint,
        executor: TextExecutor,
        images: PromptImages | None = None,
    ):
        """`images` is None for a model that takes none."""
        self._images = images
        self._inputs = inputs
        self._models = models
        self._chat = chat
        self._messages = messages
        self._responses = responses
        self._executor = executor

    async def tokenize(self, body: bytes) -> bytes:
        """Token ids of a text or a conversation. Raises RequestError for an invalid body."""
        request, _ = await self._executor.run(len(body), lambda: TOKENIZE.decode(body, lenient=False))
        prompt = await self._executor.run(len(body), lambda: self._prompt(request))
        if self._images is not None:
            prompt = await self._images.prompt(prompt, MAX_EXCESS_TOKENS)
        return await self._executor.run(len(body), lambda: self._tokenized(prompt.ids, request))

    async def detokenize(self, body: bytes) -> bytes:
        """The text of ids. Raises RequestError for ids outside the vocabulary."""
        return await self._executor.run(len(body), lambda: self._detokenize(body))

    async def count_tokens(self, body: bytes) -> bytes:
        """The number of prompt tokens of /v1/messages. Raises RequestError for an invalid body."""
        return msgspec.json.encode(
            CountResponse(await self._count(body, lambda: self._messages.counted_prompt(body)))
        )

    async def input_tokens(self, body: bytes, tenant: str) -> bytes:
        """The number of prompt tokens of /v1/responses. Raises RequestError for an invalid body."""
        return msgspec.json.encode(
            InputTokens(await self._count(body, lambda: self._responses.counted_prompt(body, tenant)))
        )

    async def _count(self, body: bytes, read: Callable[[], Prompt]) -> int:
        prompt = await self._executor.run(len(body), read)
        if self._images is not None:
            prompt = await self._images.prompt(prompt, MAX_EXCESS_TOKENS)
        return len(prompt.ids)

    def _tokenized(self, ids: list[int], request: TokenizeRequest) -> bytes:
        names = [self._tokenizer().token_text(i) for i in ids] if request.return_token_strs else None
        return msgspec.json.encode(
            TokenizeResponse(
                count=len(ids), max_model_len=self._inputs.max_model_len, tokens=ids, token_strs=names
            )
        )

    def _detokenize(self, body: bytes) -> bytes:
        request, _ = DETOKENIZE.decode(body, lenient=False)
        self._models.check(request.model)
        tokenizer = self._tokenizer()
        limit = self._inputs.max_model_len + MAX_EXCESS_TOKENS
        if len(request.tokens) > limit:
            raise RequestError(
                f"'tokens' has {len(request.tokens)} ids, at most {limit} are allowed", param="tokens"
            )
        if request.tokens:
            self._inputs.check_vocabulary(request.tokens, "tokens")
        return msgspec.json.encode(
            DetokenizeResponse(decode(tokenizer, request.tokens, skip_special_tokens=False))
        )

    def _prompt(self, request: TokenizeRequest) -> Prompt:
        self._models.check(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("send either 'prompt' or 'messages'", param="prompt")
        if request.prompt is None:
            chat = ChatRequest(**{name: getattr(request, name) for name in _CHAT_FIELDS})
            chat.add_special_tokens = request.add_special_tokens
            return self._chat.tokenized_prompt(chat)
        for name in _CHAT_FIELDS:
            if getattr(request, name) is not None:
                raise RequestError(f"'{name}' belongs to 'messages', not to 'prompt'", param=name)
        add_special_tokens = request.add_special_tokens is not False
        return Prompt(self._inputs.encode(request.prompt, add_special_tokens, MAX_EXCESS_TOKENS))

    def _tokenizer(self) -> Tokenizer:
        if self._inputs.tokenizer is None:
            raise RequestError("this model has no tokenizer: it accepts and returns token ids only")
        return self._inputs.tokenizer
