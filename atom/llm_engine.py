"""The engine as a Python object: the same processes as the server, without HTTP.

    from atom import LLMEngine, SamplingParams

    with LLMEngine(model="path/to/model", kv_cache_dtype="fp8") as engine:
        for output in engine.generate(["Hello"], SamplingParams(max_tokens=32)):
            print(output["text"])

The object belongs to one thread: it talks to the engine core when `step` is called, and only
then.
"""

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

import zmq

from atom.config.cli import engine_config_from_kwargs
from atom.config.engine import EngineConfig
from atom.config.resolve import DeviceCapabilities, resolve
from atom.messages.codec import Decoder, encode
from atom.messages.engine import (
    Abort,
    AddRequest,
    CoreDead,
    CoreReady,
    CoreStats,
    FromCore,
    GetStats,
    Hello,
    TokenDeltas,
)
from atom.messages.profile import Profile, ProfileResult
from atom.outputs import Logprobs, RequestOutput, Sequence
from atom.progress import ProgressBars
from atom.sampling_params import SamplingParams
from atom.supervisor import Supervisor
from atom.utils import envs
from atom.utils.logger import setup_logging
from frontend.chat_template import ChatTemplate
from frontend.input_processor import InputProcessor
from frontend.output_processor import OutputProcessor, TextOptions, Update
from frontend.token_logprobs import TokenLogprob
from frontend.tokenizer import Tokenizer

Prompt = str | list[int]
StreamCallback = Callable[[RequestOutput], None]

_STEP_WAIT_S = 0.2
_STATS_DEADLINE_S = 30.0
_CORE_READY_DEADLINE_S = 60.0
_PROFILE_DEADLINE_S = 330.0


class EngineDeadError(RuntimeError):
    """The engine's processes ended; the text says which one and why."""


class LLMEngine:
    """Generates text with one model.

    `LLMEngine(model, **options)` takes every field of the configuration classes by its name
    (`tensor_parallel_size`, `kv_cache_dtype`, `device`, `dtype`, …) and starts the engine's
    processes; an unknown name is a TypeError, a bad value a ValueError, and an engine that
    cannot start a RuntimeError with the first cause.
    """

    def __init__(self, model: str, **options: Any):
        config = engine_config_from_kwargs(model=model, **options)
        self._start(config, explicit={"model", *options})

    @classmethod
    def from_config(cls, config: EngineConfig, explicit: set[str]) -> "LLMEngine":
        """As the constructor; `explicit` names the fields that the user set."""
        engine = cls.__new__(cls)
        engine._start(config, explicit)
        return engine

    def _start(self, config: EngineConfig, explicit: set[str]) -> None:
        self._logger = setup_logging("library")
        self._bars = ProgressBars()
        self._supervisor = Supervisor(self._bars.update)
        self._context = zmq.Context()
        try:
            self.checkpoint, capabilities = self._supervisor.prepare(config.model)
            resolved = resolve(config, self.checkpoint, explicit, capabilities)
            for note in resolved.notes + envs.startup_notes(resolved.config.device.device):
                self._logger.info(note)
            self.config = resolved.config
            self.gpu_names = _used_gpus(resolved.config, capabilities)
            self._supervisor.start_engine(self.config, self.checkpoint)
            self._supervisor.wait_ready({"core"})
            self._bars.close()
            self._connect()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # Submitting never waits: what is queued is bounded by the prompts that the caller holds.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.connect(self._supervisor.endpoint("core"))
        self._decoder = Decoder[FromCore](FromCore)
        self._socket.send(encode(Hello(0)))
        ready = self._await_answer(CoreReady, _CORE_READY_DEADLINE_S)
        self.max_model_len: int = ready.max_model_len
        self.kv_tokens: int = ready.kv_tokens
        self.weight_bytes: list[int] = ready.weight_bytes
        self.tokenizer = Tokenizer.from_checkpoint(self.checkpoint)
        policy = self.config.scheduler.scheduling_policy
        self._input = InputProcessor(self.checkpoint, self.tokenizer, ready.max_model_len, policy)
        self._output = OutputProcessor(self.tokenizer)
        self._template = ChatTemplate.from_checkpoint(self.checkpoint)
        self._request_ids = itertools.count()
        self._live: dict[int, tuple[Sequence, StreamCallback | None]] = {}
        self._set_aside: list[Sequence] = []  # ended while `generate` waited for others

    def __enter__(self) -> "LLMEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: list[str] | list[list[int]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
    ) -> list[dict[str, Any]]:
        """Generate for all prompts (texts, or lists of token ids) and wait for the end.

        Returns one dictionary for each prompt, in order (`n` in a row where `n` > 1), with
        the keys text, token_ids, latency, finish_reason, num_tokens_input,
        num_tokens_output, ttft and tpot; times are in seconds. Where the parameters ask for
        them there are also logprobs (one dictionary of id to log probability for each of
        token_ids) and prompt_logprobs (for each prompt token; None for the first). Raises
        ValueError for a prompt that cannot be served, before any of them starts; RuntimeError
        when the engine refuses one later.
        """
        ids = self.add_request(prompts, sampling_params or SamplingParams())
        missing, done, others = set(ids), {}, []
        while missing:
            for sequence in self.step():
                if sequence.request_id in missing:
                    missing.remove(sequence.request_id)
                    done[sequence.request_id] = sequence
                else:
                    others.append(sequence)
        self._set_aside = others
        if failed := [sequence.error for sequence in done.values() if sequence.error]:
            raise RuntimeError(f"{len(failed)} of {len(ids)} sequences failed: {failed[0]}")
        return [done[request_id].as_dict() for request_id in ids]

    def add_request(
        self,
        prompt_or_tokens_list: list[str] | list[list[int]],
        sampling_params_list: SamplingParams | list[SamplingParams],
        stream_callback: StreamCallback | None = None,
    ) -> list[int]:
        """Submit prompts; `step` makes them advance. Returns the ids of the new sequences.

        `stream_callback` is called within `step` with a RequestOutput for every piece of
        output. Raises ValueError, and submits nothing, when one of the prompts is bad.
        """
        params = _one_for_each(prompt_or_tokens_list, sampling_params_list)
        prepared = [
            (prompt_ids, options, self._requests(prompt_ids, options))
            for prompt_ids, options in zip(map(self._prompt_ids, prompt_or_tokens_list), params, strict=True)
        ]
        for prompt_ids, options, requests in prepared:
            for request in requests:
                self._submit(request, prompt_ids, options, stream_callback)
        return [request.request_id for _, _, requests in prepared for request in requests]

    def step(self) -> list[Sequence]:
        """Take in what the engine made since the last call; returns the sequences that ended.

        Waits a fraction of a second when there is nothing new. Raises EngineDeadError.
        """
        if self._set_aside:
            ended, self._set_aside = self._set_aside, []
            return ended
        if not self._socket.poll(int(_STEP_WAIT_S * 1000)):
            self._check_alive()
            return []
        match self._receive():
            case TokenDeltas() as deltas:
                return self._take(deltas)
        return []

    def is_finished(self) -> bool:
        """Whether every submitted sequence has ended and been returned."""
        return not self._live and not self._set_aside

    def abort(self, request_ids: Iterable[int]) -> None:
        """Give these sequences up; they produce no further output."""
        known = [request_id for request_id in request_ids if request_id in self._live]
        for request_id in known:
            del self._live[request_id]
        self._output.forget(known)
        self._socket.send(encode(Abort(known)))

    def stats(self) -> CoreStats:
        """The engine core's counters. Only while nothing is in progress."""
        if self._live:
            raise RuntimeError("stats() needs an idle engine: finish or abort what runs first")
        self._socket.send(encode(GetStats()))
        stats: CoreStats = self._await_answer(CoreStats, _STATS_DEADLINE_S)
        return stats

    def start_profile(self) -> None:
        """Record what the workers compute from now on; needs `torch_profiler_dir`.

        Raises RuntimeError where that makes no sense or fails.
        """
        self._profile(True)

    def stop_profile(self) -> list[str]:
        """End the recording; returns the paths of the traces, one for each rank.

        Raises RuntimeError as `start_profile` does.
        """
        return [f"{trace.directory}/{trace.file}" for trace in self._profile(False).traces]

    def _profile(self, on: bool) -> ProfileResult:
        self._socket.send(encode(Profile(on)))
        answer: ProfileResult = self._await_answer(ProfileResult, _PROFILE_DEADLINE_S)
        if answer.refusal or answer.error:
            raise RuntimeError(answer.refusal or f"profiling failed: {answer.error}")
        return answer

    @property
    def template_options(self) -> frozenset[str]:
        """The variables that the model's chat template reads; none without a template."""
        return frozenset() if self._template is None else self._template.options

    def chat_prompt(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation in the model's chat template, ready for `generate`.

        `options` (such as `enable_thinking`) go to the template. Raises ValueError for a model
        without a template, and for an option that is not among `template_options`.
        """
        if self._template is None:
            raise ValueError("this model has no chat template: give prompts instead of messages")
        text = self._template.render(messages, options)
        return self._input.encode(text, add_special_tokens=False)

    def pids(self) -> dict[str, int]:
        """Process ids by name: core, worker 0, …"""
        return self._supervisor.pids()

    def close(self) -> None:
        """End the engine's processes. May be called twice."""
        self._bars.close()
        self._supervisor.close()
        self._context.destroy(linger=0)

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        return self._input.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _requests(self, prompt_ids: list[int], params: SamplingParams) -> list[AddRequest]:
        ids = list(itertools.islice(self._request_ids, params.n))
        return self._input.requests(prompt_ids, params, ids)

    def _submit(
        self,
        request: AddRequest,
        prompt_ids: list[int],
        params: SamplingParams,
        callback: StreamCallback | None,
    ) -> None:
        sequence = Sequence(
            request.request_id,
            prompt_ids,
            logprobs=None if params.logprobs is None else [],
            prompt_logprobs=None if params.prompt_logprobs is None else [],
            submitted=time.monotonic(),
        )
        self._live[request.request_id] = (sequence, callback)
        text = TextOptions(
            params.stop_strings or (), params.include_stop_str_in_output, params.skip_special_tokens
        )
        self._output.add(request, text)
        self._socket.send(encode(request))

    def _take(self, deltas: TokenDeltas) -> list[Sequence]:
        processed = self._output.process(deltas)
        if processed.aborts:
            self._socket.send(encode(Abort(processed.aborts)))
        now = time.monotonic()
        ended = []
        for update in processed.updates:
            sequence, callback = self._live[update.request_id]
            if update.token_ids and not sequence.token_ids:
                sequence.first_token = now
                sequence.num_cached_tokens = update.cached_tokens
            sequence.token_ids.extend(update.token_ids)
            if update.text:
                sequence.text += update.text
            logprobs = [_as_logprobs(entry) for entry in update.logprobs] if update.logprobs else []
            if sequence.logprobs is not None:
                sequence.logprobs += logprobs
            if sequence.prompt_logprobs == [] and update.token_ids:
                sequence.prompt_logprobs = [None, *map(_as_logprobs, update.prompt_logprobs)]
            if update.finished:
                sequence.finished = now
                sequence.finish_reason, sequence.error = update.reason, update.error
                del self._live[update.request_id]
                ended.append(sequence)
            if callback is not None:
                callback(_as_output(update, logprobs, sequence))
        return ended

    def _receive(self) -> Any:
        message = self._decoder.decode(self._socket.recv())
        if isinstance(message, CoreDead):
            raise EngineDeadError(message.reason)
        return message

    def _await_answer(self, kind: type[Any], timeout_s: float) -> Any:
        """The next message of that kind; output that comes before it is kept for `step`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._socket.poll(int(_STEP_WAIT_S * 1000)):
                message = self._receive()
                if isinstance(message, kind):
                    return message
                if isinstance(message, TokenDeltas):
                    self._set_aside += self._take(message)
            else:
                self._check_alive()
        raise EngineDeadError(f"the engine core gave no {kind.__name__} within {timeout_s:.0f} s")

    def _check_alive(self) -> None:
        try:
            self._supervisor.check(wait_s=0)
        except RuntimeError as error:
            raise EngineDeadError(str(error)) from None


def _used_gpus(config: EngineConfig, capabilities: DeviceCapabilities) -> list[str]:
    """Names of the GPUs that the workers compute on; none on a CPU."""
    count = config.parallel.tensor_parallel_size if config.device.device == "cuda" else 0
    return capabilities.names[:count]


def _one_for_each(
    prompts: list[str] | list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * len(prompts)
    if len(params) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts but {len(params)} sampling parameters")
    return params


def _as_output(update: Update, logprobs: list[Logprobs], sequence: Sequence) -> RequestOutput:
    return RequestOutput(
        update.request_id,
        update.token_ids.tolist(),
        update.text,
        finished=sequence.finish_reason is not None,
        finish_reason=sequence.finish_reason,
        num_cached_tokens=sequence.num_cached_tokens,
        logprobs=logprobs,
    )


def _as_logprobs(entry: TokenLogprob) -> Logprobs:
    return {entry.token_id: entry.logprob} | dict(entry.top)
