"""The engine as a Python object: the same processes as the server, without HTTP.

    from atom import LLMEngine, SamplingParams

    with LLMEngine(model="path/to/model", kv_cache_dtype="fp8") as engine:
        for output in engine.generate(["Hello"], SamplingParams(max_tokens=32)):
            print(output["text"])

The object belongs to one thread, and receives from the engine core only while a method runs.
"""

import functools
import itertools
import os
import time
import traceback
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Unpack

import msgspec
import zmq

from atom.engine.client_parts import Chat, ClientParts
from atom.engine.engine_host import EngineHost, check_no_other_servers, check_one_node, check_same_engines
from atom.engine.engine_options import EngineOptions
from atom.engine.errors import EngineDeadError
from atom.engine.mtp_statistics import mtp_statistics, mtp_text
from atom.engine.prompts import Conversation, Prompt, Prompts, conversations_of, prompts_of
from atom.engine.results import logprobs_of, output_of, text_options
from atom.shared.config.cli import engine_config_from_kwargs
from atom.shared.config.engine import EngineConfig
from atom.shared.config.resolve import DeviceCapabilities
from atom.shared.messages.engine import (
    AddRequest,
    CoreDead,
    CoreReady,
    CoreStats,
    FromCore,
    GetStats,
    KVTierStats,
    TokenDeltas,
)
from atom.shared.messages.grammar import CompiledGrammar, Grammar, GrammarSource
from atom.shared.messages.profile import Profile, ProfileResult
from atom.shared.outputs import RequestOutput, Sequence
from atom.shared.sampling_params import SamplingParams, StructuredOutputsParams
from atom.shared.utils import envs
from atom.shared.utils.logger import setup_logging
from atom.supervisor import Supervisor
from atom.supervisor.progress import ProgressBars
from frontend.engine_client.core_links import CoreLinks
from frontend.text.constraint import constraint_of
from frontend.text.grammar_process import GrammarProcess
from frontend.text.live_grammars import LiveGrammars
from frontend.text.output_processor import OutputProcessor, RequestState

__all__ = ["EngineDeadError", "LLMEngine", "Prompt", "StreamCallback"]

StreamCallback = Callable[[RequestOutput], None]

_MAX_GRAMMARS = 64
_STEP_WAIT_S = 0.2
_STATS_DEADLINE_S = 30.0
_CORE_READY_DEADLINE_S = 60.0
_PROFILE_DEADLINE_S = 330.0


@dataclass(slots=True)
class _Running:
    """A sequence that runs, and where its output goes."""

    state: RequestState
    sequence: Sequence
    index: int
    """Its number among the `n` of its request."""
    callback: StreamCallback | None


class LLMEngine:
    """Generates text with one model.

    `LLMEngine(model, **options)` takes every field of the configuration classes by its name
    (`tensor_parallel_size`, `kv_cache_dtype`, `device`, `dtype`, …) and starts the engine's
    processes; an unknown name is a TypeError, a bad value a ValueError, and an engine that
    cannot start a RuntimeError with the root cause. A dead engine is not restarted: its methods raise
    EngineDeadError. The processes end with `with` or `close`, else with the object.
    """

    def __init__(self, model: str, **options: Unpack[EngineOptions]):
        config = engine_config_from_kwargs(model=model, **options)
        self._start(config, explicit={"model", *options})

    @classmethod
    def from_config(cls, config: EngineConfig, explicit: set[str]) -> "LLMEngine":
        """As the constructor; `explicit` names the fields that the user set."""
        engine = cls.__new__(cls)
        engine._start(config, explicit)
        return engine

    def _start(self, config: EngineConfig, explicit: set[str]) -> None:
        check_one_node(config)
        check_no_other_servers(config)
        check_same_engines(config)
        setup_logging("library", config.observability.log_level)
        self._bars = ProgressBars()
        self._grammar_process: GrammarProcess | None = None
        self._is_closed = False
        self._running: dict[int, _Running] = {}  # by request id
        self._supervisor = Supervisor(self._bars.update)
        weakref.finalize(self, _end, self._supervisor, os.getpid())
        self._context = zmq.Context()
        try:
            host = EngineHost(config, explicit)
            host.prepare(self._supervisor.prepare)
            host.resolve(_notes())
            host.config = _without_mixed_limit(host.config)
            self.checkpoint = host.checkpoint
            self.config = host.config
            self.gpu_names = _used_gpus(host.config, host.capabilities)
            host.start(self._supervisor)
            self._supervisor.wait_ready()
            self._bars.close()
            self._connect(ClientParts.of(host))
        except BaseException as error:
            # After Ctrl-C they may hold a socket that its context does not know: its end would wait for ever.
            traceback.clear_frames(error.__traceback__)
            self.close()
            raise

    def _connect(self, parts: ClientParts) -> None:
        self._grammar_process = parts.grammar_process
        self._grammars = LiveGrammars()
        self._links = CoreLinks(self._context, self._supervisor.engines, parts.router, self._grammars.source)
        self._links.connect()
        ready = self._wait_for_all(CoreReady, _CORE_READY_DEADLINE_S)
        self.max_model_len: int = min(one.max_model_len for one in ready)
        self.kv_tokens: int = sum(one.kv_tokens for one in ready)
        self.weight_bytes: list[int] = [size for one in ready for size in one.weight_bytes]
        self._input = parts.inputs
        self._input.max_model_len = self.max_model_len
        self.tokenizer = parts.inputs.tokenizer
        self._output = OutputProcessor(self.tokenizer)
        self._compile = functools.lru_cache(_MAX_GRAMMARS)(
            functools.partial(_compiled, parts.grammar_process)
        )
        self._chat = Chat(self.checkpoint, self._input)
        self._request_ids = itertools.count()
        self._finished_early: list[Sequence] = []  # returned by the next `step`

    def __enter__(self) -> "LLMEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
    ) -> list[dict[str, Any]]:
        """Generate for one prompt (a text, or a list of token ids) or a list, and wait until all have ended.

        Returns a list with one dictionary for each prompt, in order (`n` in a row where `n` > 1), with
        the keys text, token_ids, latency, finish_reason, num_tokens_input,
        num_tokens_output, ttft and tpot; times are in seconds. When
        requested there are also logprobs (one dictionary of id to log probability for each of
        token_ids) and prompt_logprobs (for each prompt token; None for the first). Raises
        ValueError for a prompt that cannot be served, before any of them starts; RuntimeError
        when the engine refuses one later; TypeError for another form of prompt.
        """
        ids = self.add_request(prompts, sampling_params or SamplingParams())
        missing = set(ids)
        done = {}
        others = []
        while missing:
            for sequence in self.step():
                if sequence.request_id in missing:
                    missing.remove(sequence.request_id)
                    done[sequence.request_id] = sequence
                else:
                    others.append(sequence)
        self._finished_early = others
        if failed := [sequence.error for sequence in done.values() if sequence.error]:
            raise RuntimeError(f"{len(failed)} of {len(ids)} sequences failed: {failed[0]}")
        return [done[request_id].as_dict() for request_id in ids]

    def chat(
        self,
        messages: Conversation | list[Conversation],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """Generate the next message of a conversation, or of each in a list; waits and returns as `generate`.

        `options` as in `chat_prompt`. Raises ValueError as that and `generate` do.
        """
        prompts = [self.chat_prompt(each, **options) for each in conversations_of(messages)]
        return self.generate(prompts, sampling_params)

    def add_request(
        self,
        prompt_or_tokens_list: Prompts,
        sampling_params_list: SamplingParams | list[SamplingParams],
        stream_callback: StreamCallback | None = None,
        predictions: list[list[int]] | None = None,
    ) -> list[int]:
        """Submit prompts; `step` receives their output. Returns the ids of the new sequences.

        `predictions` are the expected output ids of each prompt, as text for `--method ngram` to look
        up; they change the speed and not the output.

        `stream_callback` is called within `step` with a RequestOutput for each sequence's new
        output. Raises ValueError or TypeError, and submits nothing, for an invalid prompt or prediction.
        """
        self._check_open()
        prompts = prompts_of(prompt_or_tokens_list)
        params = _one_for_each(prompts, sampling_params_list)
        expected = predictions or [[]] * len(params)
        all_prompts = map(self._prompt_ids, prompts)
        prepared = [
            (prompt_ids, options, self._request(prompt_ids, options, prediction))
            for prompt_ids, options, prediction in zip(all_prompts, params, expected, strict=True)
        ]
        for prompt_ids, options, request in prepared:
            self._submit(request, prompt_ids, options, stream_callback)
        return [request_id for _, _, request in prepared for request_id in request.request_ids]

    def step(self) -> list[Sequence]:
        """Receive new output; returns the sequences that have finished.

        Waits a fraction of a second when there is none. Raises EngineDeadError.
        """
        if self._finished_early:
            ended = self._finished_early
            self._finished_early = []
            return ended
        _, message = self._receive()
        return self._process_deltas(message) if isinstance(message, TokenDeltas) else []

    def is_finished(self) -> bool:
        """Whether every submitted sequence has finished and been returned."""
        return not self._running and not self._finished_early

    def abort(self, request_ids: Iterable[int]) -> None:
        """Stop these sequences; they produce no further output."""
        running = [request_id for request_id in request_ids if request_id in self._running]
        for request_id in running:
            del self._running[request_id]
        self._links.abort(running)
        for request_id in running:
            self._links.end(request_id)

    def stats(self) -> CoreStats:
        """The engine cores' counters, summed. Raises RuntimeError while sequences are running."""
        self._check_open()
        if self._running:
            raise RuntimeError("stats() needs an idle engine: finish or abort the running sequences first")
        self._links.send_to_all(GetStats())
        return _sum(self._wait_for_all(CoreStats, _STATS_DEADLINE_S))

    def get_mtp_statistics(self) -> dict[str, Any]:
        """Figures of speculative decoding: acceptance by position. Raises RuntimeError as `stats` does."""
        return mtp_statistics(self.stats())

    def print_mtp_statistics(self) -> None:
        """Print the figures of speculative decoding. Raises RuntimeError as `stats` does."""
        print(mtp_text(self.get_mtp_statistics()))

    def start_profile(self) -> None:
        """Start profiling on all workers; needs `torch_profiler_dir`.

        Raises RuntimeError when profiling is on already or fails.
        """
        self._profile(True)

    def stop_profile(self) -> list[str]:
        """Stop profiling; returns the paths of the traces, one for each rank.

        Raises RuntimeError as `start_profile` does.
        """
        results = self._profile(False)
        return [f"{trace.directory}/{trace.file}" for result in results for trace in result.traces]

    def _profile(self, on: bool) -> list[ProfileResult]:
        self._check_open()
        self._links.send_to_all(Profile(on))
        results: list[ProfileResult] = self._wait_for_all(ProfileResult, _PROFILE_DEADLINE_S)
        for result in results:
            if result.refusal or result.error:
                raise RuntimeError(result.refusal or f"profiling failed: {result.error}")
        return results

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

    def pids(self) -> dict[str, int]:
        """Process ids by name: core, worker 0, …"""
        return self._supervisor.pids()

    def close(self) -> None:
        """End the engine's processes; later calls raise EngineDeadError. May be called twice."""
        self._is_closed = True
        self._running.clear()
        self._bars.close()
        if self._grammar_process is not None:
            self._grammar_process.close()
        self._supervisor.close()
        self._context.destroy(linger=0)

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        return self._input.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _request(self, prompt_ids: list[int], params: SamplingParams, prediction: list[int]) -> AddRequest:
        checked = self._input.check_params(params, self._grammar(params))
        ids = list(itertools.islice(self._request_ids, params.n))
        return self._input.request(prompt_ids, params, ids, checked=checked, prediction_ids=prediction)

    def prepare_grammar(self, params: StructuredOutputsParams) -> None:
        """Compile a grammar ahead of the requests with it; may run in any thread. Raises ValueError."""
        self._compile(constraint_of(params).source)

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        """The grammar of the outputs; waits until it is compiled."""
        if params.structured_outputs is None:
            return None
        constraint = constraint_of(params.structured_outputs)
        row = self._input.row_grammar(constraint, params, None)
        return self._grammars.grammar(row, self._compile(constraint.source))

    def _submit(
        self,
        request: AddRequest,
        prompt_ids: list[int],
        params: SamplingParams,
        callback: StreamCallback | None,
    ) -> None:
        for index, request_id in enumerate(request.request_ids):
            sequence = Sequence(
                request_id,
                prompt_ids,
                logprobs=None if params.logprobs is None else [],
                prompt_logprobs=None if params.prompt_logprobs is None else [],
                submitted=time.monotonic(),
            )
            state = self._output.new_state(request, text_options(params))
            self._running[request_id] = _Running(state, sequence, index, callback)
        self._links.add(request)

    def _process_deltas(self, deltas: TokenDeltas) -> list[Sequence]:
        processed = self._output.process(deltas, self._running)
        self._links.abort(processed.aborts)
        now = time.monotonic()
        ended = []
        for running, update in processed.updates:
            sequence = running.sequence
            if update.token_ids and not sequence.token_ids:
                sequence.first_token = now
                sequence.num_cached_tokens = update.cached_tokens
            sequence.token_ids.extend(update.token_ids)
            if update.text:
                sequence.text += update.text
            logprobs = logprobs_of(update.logprobs) if update.logprobs else []
            if sequence.logprobs is not None:
                sequence.logprobs += logprobs
            if sequence.prompt_logprobs == [] and update.token_ids:
                sequence.prompt_logprobs = [None, *logprobs_of(update.prompt_logprobs)]
            if update.finished:
                sequence.finished = now
                sequence.finish_reason = update.reason
                sequence.error = update.error
                del self._running[update.request_id]
                self._links.end(update.request_id)
                ended.append(sequence)
            if running.callback is not None:
                cached = sequence.num_cached_tokens
                running.callback(output_of(update, update.request_id, running.index, cached, logprobs))
        return ended

    def _receive(self) -> tuple[int, FromCore | None]:
        """The next message, with its rank; None when none came in a fraction of a second.

        Raises EngineDeadError.
        """
        self._check_open()
        rank, message = self._links.receive(_STEP_WAIT_S) or (0, None)
        if isinstance(message, CoreDead):
            raise EngineDeadError(message.reason)
        if message is None:
            self._check_alive()
        return rank, message

    def _wait_for_all(self, kind: type[Any], timeout_s: float) -> list[Any]:
        """The next `kind` of message of each engine; sequences that finish meanwhile are kept for `step`."""
        deadline = time.monotonic() + timeout_s
        received = {}
        while time.monotonic() < deadline:
            rank, message = self._receive()
            if isinstance(message, kind):
                received[rank] = message
                if len(received) == len(self._links):
                    return [received[rank] for rank in sorted(received)]
            if isinstance(message, TokenDeltas):
                self._finished_early += self._process_deltas(message)
        raise EngineDeadError(f"an engine core sent no {kind.__name__} within {timeout_s:.0f} s")

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineDeadError("this engine is closed: make another one")

    def _check_alive(self) -> None:
        try:
            self._supervisor.check(wait_s=0)
        except RuntimeError as error:
            raise EngineDeadError(str(error)) from None


def _end(supervisor: Supervisor, owner: int) -> None:
    """End the processes of an engine that was not closed; not in a fork of process `owner`."""
    if os.getpid() == owner:
        supervisor.close()


def _compiled(process: GrammarProcess, source: GrammarSource) -> CompiledGrammar:
    """Raises ValueError for a source that cannot be used, or that takes too long this time."""
    grammar, _ = process.compile(source)
    if grammar.error:
        raise ValueError(f"structured_outputs: {grammar.error}")
    return grammar


def _sum(stats: list[CoreStats]) -> CoreStats:
    """The sum of each counter, and the heaps of all workers.

    Lists are added element by element, and empty ones add nothing.
    """
    heaps = [heap for each in stats for heap in each.worker_heaps]
    others = (msgspec.structs.replace(each, worker_heaps=[]) for each in stats)
    columns = zip(*map(msgspec.structs.astuple, others), strict=True)
    return msgspec.structs.replace(CoreStats(*(_sum_of(column) for column in columns)), worker_heaps=heaps)


def _sum_of(values: tuple[Any, ...]) -> Any:
    first = values[0]
    if isinstance(first, list):
        return [_sum_of(places) for places in zip(*filter(None, values), strict=True)]
    if isinstance(first, KVTierStats):
        columns = list(zip(*map(msgspec.structs.astuple, values), strict=True))
        return KVTierStats(first.medium, *map(sum, columns[1:]))
    return sum(values)


def _notes() -> list[str]:
    """Variables that the library does not read."""
    if envs.ATOM_DP_SIZE > 1:
        return [f"ATOM_DP_SIZE={envs.ATOM_DP_SIZE} has no effect: it is read by atom-launch alone"]
    return []


def _without_mixed_limit(config: EngineConfig) -> EngineConfig:
    """Unless the user set one: offline no user waits for the next token, and larger steps take less time."""
    scheduler = config.scheduler
    mixed = scheduler.max_num_mixed_tokens or scheduler.max_num_batched_tokens
    return replace(config, scheduler=replace(scheduler, max_num_mixed_tokens=mixed))


def _used_gpus(config: EngineConfig, capabilities: DeviceCapabilities) -> list[str]:
    """Names of the workers' GPUs; empty on a CPU."""
    parallel = config.parallel
    count = parallel.tensor_parallel_size * parallel.data_parallel_size
    return capabilities.names[:count] if config.device.device == "cuda" else []


def _one_for_each(
    prompts: list[Prompt], params: SamplingParams | list[SamplingParams]
) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * len(prompts)
    if len(params) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts but {len(params)} sampling parameters")
    return params
