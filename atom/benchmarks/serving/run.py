"""One run against a server: warm-up, load, metrics."""

import argparse
import random
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import uvloop

from atom.benchmarks.backend_request_func import (
    ASYNC_REQUEST_FUNCS,
    BACKENDS,
    RequestFuncInput,
    RequestFuncOutput,
)
from atom.benchmarks.serving.datasets import SampleRequest, TextSource
from atom.benchmarks.serving.errors import BenchmarkError
from atom.benchmarks.serving.load import Load, Send, open_session, post_profile, run_load, warm_up
from atom.benchmarks.serving.metrics import BenchmarkMetrics, calculate_metrics
from atom.benchmarks.serving.speculation import Speculation, read_speculation
from atom.benchmarks.serving.tokenizer import (
    PromptTokenizer,
    has_tokenizer,
    load_tokenizer,
    vocabulary_size,
)
from atom.shared.utils.open_files import OpenFilesError, raise_open_files_limit

__all__ = [
    "Run",
    "benchmark",
    "check_server",
    "count_tokens",
    "request_inputs",
    "run_checked",
    "server_url",
    "text_source",
]

_CONNECT_DEADLINE_S = 5.0
_INTERRUPTED = 130


@dataclass(frozen=True)
class Run:
    """The results of a run."""

    metrics: BenchmarkMetrics
    outputs: list[RequestFuncOutput]
    """In the order of the requests."""
    speculation: Speculation | None
    """Speculative decoding in this run; None if the server has no such counters."""


def run_checked(
    args: argparse.Namespace,
    check: Callable[[argparse.Namespace], None],
    measure: Callable[[argparse.Namespace], Coroutine[Any, Any, int]],
) -> int:
    """Returns the exit status of `measure`; 1, after a line on the error, if the benchmark cannot run."""
    try:
        check(args)
        check_server(server_url(args))  # before tokenizers and prompts, which take a minute
        raise_open_files_limit()
        return uvloop.run(measure(args))
    except (BenchmarkError, OpenFilesError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED


def text_source(args: argparse.Namespace) -> TextSource:
    """The tokenizer of --tokenizer or --model, or the vocabulary size of a model without one.

    Raises BenchmarkError.
    """
    if args.tokenizer is not None or has_tokenizer(args.model):
        name = args.tokenizer or args.model
        tokenizer = load_tokenizer(name, args.tokenizer_mode, args.trust_remote_code)
        return TextSource(tokenizer, tokenizer.vocab_size)
    size = vocabulary_size(args.model)
    if size is None:
        raise BenchmarkError(f"{args.model} has no tokenizer and no vocab_size: set --tokenizer")
    if not BACKENDS[args.backend].takes_ids:
        raise BenchmarkError(
            f"{args.model} has no tokenizer, and --backend {args.backend} takes only text: "
            "set --tokenizer, or use --backend vllm"
        )
    print(f"{args.model} has no tokenizer: prompts are sent as token ids")
    return TextSource(None, size)


def server_url(args: argparse.Namespace) -> str:
    """The base URL, without a slash at the end."""
    host = f"[{args.host}]" if ":" in args.host else args.host
    return (args.base_url or f"http://{host}:{args.port}").rstrip("/")


def check_server(url: str) -> None:
    """Raise BenchmarkError unless something accepts connections at `url`; nothing is sent."""
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        if not parts.hostname or parts.scheme not in ("http", "https"):
            raise ValueError("give it as http://HOST:PORT")
        socket.create_connection((parts.hostname, port), _CONNECT_DEADLINE_S).close()
    except ValueError as error:
        raise BenchmarkError(f"--base-url {url}: {error}") from None
    except OSError as error:
        raise BenchmarkError(
            f"no server answers at {url}: {error.strerror or error}; start it first, or set --host, --port "
            "or --base-url"
        ) from None


def request_inputs(args: argparse.Namespace, samples: Sequence[SampleRequest]) -> list[RequestFuncInput]:
    """One request per sample; with --lora-modules each uses a random one of them."""
    rng = random.Random(args.seed)
    extra = {"use_beam_search": True} if args.use_beam_search else None
    return [
        RequestFuncInput(
            prompt=sample.prompt,
            api_url=server_url(args) + args.endpoint,
            prompt_len=sample.prompt_len,
            output_len=sample.output_len,
            model=args.model,
            model_name=rng.choice(args.lora_modules) if args.lora_modules else args.served_model_name,
            best_of=args.best_of,
            logprobs=args.logprobs,
            extra_body=extra,
            multi_modal_content=sample.multi_modal_content,
            ignore_eos=args.ignore_eos,
        )
        for sample in samples
    ]


async def benchmark(
    args: argparse.Namespace, samples: Sequence[SampleRequest], tokenizer: PromptTokenizer | None
) -> Run:
    """Send `samples` with the load of the flags. Raises BenchmarkError."""
    requests = request_inputs(args, samples)
    base_url = server_url(args)
    load = Load(args.request_rate, args.burstiness, args.max_concurrency, args.seed)
    most = "unlimited" if args.max_concurrency is None else str(args.max_concurrency)
    print(
        f"{len(requests)} requests, {args.request_rate} per second (burstiness {args.burstiness}), "
        f"concurrency: {most}",
        flush=True,
    )
    async with open_session(args.max_concurrency) as session:
        send = _sender(args.backend, session)
        await warm_up(send, requests[0], args.num_warmups)
        before = await read_speculation(session, base_url)
        if args.profile:
            await post_profile(session, f"{base_url}/start_profile")
        outputs, seconds = await run_load(send, requests, load, not args.disable_tqdm)
        if args.profile:
            await post_profile(session, f"{base_url}/stop_profile")
        after = await read_speculation(session, base_url)
    count_tokens(outputs, tokenizer)
    metrics = calculate_metrics(outputs, seconds, args.metric_percentiles, dict(args.goodput or []))
    return Run(metrics, outputs, after - before if before and after else None)


def count_tokens(outputs: Sequence[RequestFuncOutput], tokenizer: PromptTokenizer | None) -> None:
    """Count the output tokens of responses without usage: with the tokenizer, else as events."""
    uncounted = [output for output in outputs if output.success and output.output_tokens is None]
    if not uncounted:
        return
    if tokenizer is None:
        counts = [output.events for output in uncounted]
    else:
        counts = [len(ids) for ids in tokenizer.encode_all([output.generated_text for output in uncounted])]
    for output, count in zip(uncounted, counts, strict=True):
        output.output_tokens = count
    how = "events" if tokenizer is None else "the tokenizer"
    print(f"{len(uncounted)} responses have no usage: tokens are counted by {how}")


def _sender(backend: str, session: aiohttp.ClientSession) -> Send:
    function = ASYNC_REQUEST_FUNCS[backend]
    return lambda request: function(request, session)
