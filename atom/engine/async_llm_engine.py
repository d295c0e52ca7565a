"""The engine for asyncio programs: many requests at once, each a stream of its output.

from atom import AsyncLLMEngine, SamplingParams

async with AsyncLLMEngine(model="path/to/model") as engine:
    async for output in engine.generate("Hello", SamplingParams(max_tokens=32), "request-1"):
        print(output.text, end="")
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from types import TracebackType
from typing import Any, Unpack

import msgspec

from atom.engine.client_parts import Chat
from atom.engine.engine_host import check_no_other_servers, check_one_node
from atom.engine.engine_options import EngineOptions
from atom.engine.engine_service import EngineService
from atom.engine.errors import EngineDeadError
from atom.engine.prompts import prompt_of
from atom.engine.results import logprobs_of, output_of, text_options
from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.cli import engine_config_from_kwargs
from atom.shared.config.engine import EngineConfig
from atom.shared.messages.engine import AddRequest
from atom.shared.outputs import RequestOutput
from atom.shared.sampling_params import SamplingParams
from atom.shared.utils.logger import setup_logging
from atom.supervisor.progress import ProgressBars
from frontend.errors import ApiError, EngineError, EngineLostError, RequestError, UnavailableError
from frontend.text.constraint import constraint_of
from frontend.text.tokenizer import Tokenizer

__all__ = ["AsyncLLMEngine"]


class AsyncLLMEngine:
    """Generates text with one model, in the event loop that starts it.

    Takes the options of `LLMEngine`, and raises the same errors for invalid ones. `async with` starts the
    engine's processes and ends them; so do `start` and `close`.

    An engine that dies is started again, `max_restarts` times in a row, and the requests that it ran go on,
    `max_replays` times each. They fail with EngineDeadError where that is not possible.
    """

    def __init__(self, model: str, **options: Unpack[EngineOptions]):
        config = engine_config_from_kwargs(model=model, **options)
        self._create(config, explicit={"model", *options})

    @classmethod
    def from_config(cls, config: EngineConfig, explicit: set[str]) -> "AsyncLLMEngine":
        """As the constructor; `explicit` names the fields that the user set."""
        engine = cls.__new__(cls)
        engine._create(config, explicit)
        return engine

    def _create(self, config: EngineConfig, explicit: set[str]) -> None:
        check_one_node(config)
        check_no_other_servers(config)
        self._bars = ProgressBars()
        self._log_level = config.observability.log_level
        replays = config.reliability.max_replays
        self._service = EngineService(config, explicit, max_replays=replays, on_progress=self._bars.update)

    async def __aenter__(self) -> "AsyncLLMEngine":
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the engine's processes, and wait until they are ready.

        Raises RuntimeError with the root cause when they cannot start, ValueError for settings that do not
        fit the model or the host.
        """
        setup_logging("library", self._log_level)
        try:
            await self._service.start()
            self._chat = Chat(self.checkpoint, self._service.parts.inputs)
        except BaseException:
            await self.close()
            raise
        finally:
            self._bars.close()

    async def close(self) -> None:
        """End the engine's processes; running requests fail. May be called twice."""
        await self._service.close()

    @property
    def config(self) -> EngineConfig:
        """The configuration, complete once the engine has started."""
        return self._service.host.config

    @property
    def checkpoint(self) -> Checkpoint:
        """What is known of the model, once the engine has started."""
        return self._service.host.checkpoint

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None for a model that has none, and takes token ids only."""
        return self._service.parts.inputs.tokenizer

    @property
    def max_model_len(self) -> int:
        """Tokens that a prompt and its output may have together."""
        return self._service.parts.inputs.max_model_len

    @property
    def template_options(self) -> frozenset[str]:
        """Names of the variables that the model's chat template reads; empty without a template."""
        return self._chat.options

    def chat_prompt(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation in the model's chat template, ready for `generate`.

        `options` (such as `enable_thinking`) are passed to the template. Raises ValueError for a model
        without a template, and for an option that is not among `template_options`.
        """
        return self._chat.prompt(messages, options)

    async def generate(
        self,
        prompt: str | list[int],
        sampling_params: SamplingParams | None = None,
        request_id: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Generate for one prompt, a text or a list of token ids; yields new output as it comes.

        Each RequestOutput has what is new of one sequence: `index` numbers the `n` of the request, and the
        last output of each has `finished`. A reader that is slower than the model gets several tokens at
        once. When the reading task is cancelled or the generator closed, the request is aborted.

        `request_id` names the request in its outputs, in the log and for `abort`; running requests should
        have different names. Without one it is a number.

        Raises ValueError for a prompt or parameters that cannot be served, TypeError for a list of prompts,
        EngineDeadError when no engine
        can go on with the request, RuntimeError when the engine refuses it.
        """
        params = sampling_params or SamplingParams()
        with _errors_of_the_library():
            request = await self._request(prompt, params, request_id)
            numbers = request.request_ids
            cached = dict.fromkeys(numbers, 0)
            async with self._service.client.open([request], text_options(params)) as stream:
                async for updates in stream:
                    for update in updates:
                        if update.error:
                            raise EngineError(update.error)
                        number = update.request_id
                        cached[number] += update.cached_tokens
                        index = numbers.index(number)
                        logprobs = logprobs_of(update.logprobs)
                        yield output_of(update, request.name, index, cached[number], logprobs)

    async def abort(self, request_id: str) -> None:
        """End a request: its `generate` ends with finish reason aborted. Unknown names are ignored.

        Raises EngineDeadError when no engine responds.
        """
        with _errors_of_the_library():
            await self._service.client.abort_named([request_id])

    async def _request(self, prompt: str | list[int], params: SamplingParams, name: str) -> AddRequest:
        """The request for the engine, with new numbers. Raises ApiError."""
        service = self._service
        if service.death:
            raise UnavailableError(service.death)
        inputs = service.parts.inputs
        # A long text takes milliseconds: other requests go on meanwhile.
        one = prompt_of(prompt)
        ids = await asyncio.to_thread(inputs.encode, one) if isinstance(one, str) else one
        structure = params.structured_outputs
        constraint = None if structure is None else constraint_of(structure)
        checked = inputs.check_params(params, await service.grammar(constraint, params))
        numbers = service.client.new_ids(params.n)
        request = inputs.request(ids, params, numbers, checked=checked)
        return msgspec.structs.replace(request, name=name or str(numbers[0]))


@contextlib.contextmanager
def _errors_of_the_library() -> Iterator[None]:
    """The client's errors are the server's: raise ours instead, but for a RequestError, a ValueError."""
    try:
        yield
    except RequestError:
        raise
    except (EngineLostError, UnavailableError) as error:
        raise EngineDeadError(error.message) from None
    except ApiError as error:
        raise RuntimeError(error.message) from None
