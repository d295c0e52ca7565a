"""The requests of a run: prompts and output lengths.

    random      random tokens of a given length
    sharegpt    the first two turns of conversations, from the ShareGPT JSON file
    burstgpt    lengths from the BurstGPT CSV file, random tokens
    sonnet      lines of a poem after a common prefix, from a text file
    hf          first turns of a dataset of conversations, on the hub or in a local file

All random numbers come from generators seeded by --seed: the same flags give the same requests.
"""

import argparse
import csv
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atom.benchmarks.serving.errors import BenchmarkError
from atom.benchmarks.serving.prompts import Ids, exact_texts, random_ids, stable_tokens
from atom.benchmarks.serving.tokenizer import PromptTokenizer

__all__ = ["DATASETS", "SampleRequest", "TextSource", "load_requests"]

_MIN_TURN = 4
_MAX_PROMPT = 1024
_MAX_TOTAL = 2048
_BURST_MODEL = "GPT-4"
_POEM_INTRODUCTION = "Write a poem in the manner of these lines, and take up as many of them as you can:\n"


@dataclass(frozen=True)
class SampleRequest:
    """One request of a data set."""

    prompt: str | Ids
    prompt_len: int
    output_len: int
    multi_modal_content: dict[str, Any] | None = None


@dataclass(frozen=True)
class TextSource:
    """A tokenizer to make prompts with, or None for random ids below `vocab_size`."""

    tokenizer: PromptTokenizer | None
    vocab_size: int

    def needed_tokenizer(self, dataset: str) -> PromptTokenizer:
        """The tokenizer. Raises BenchmarkError if there is none."""
        if self.tokenizer is None:
            raise BenchmarkError(
                f"--dataset-name {dataset} has text: set --tokenizer, or use --dataset-name random"
            )
        return self.tokenizer


def load_requests(args: argparse.Namespace, source: TextSource) -> list[SampleRequest]:
    """At most --num-prompts requests of --dataset-name. Raises BenchmarkError."""
    if args.num_prompts < 1:
        raise BenchmarkError(f"--num-prompts {args.num_prompts}: it must be at least 1")
    requests = DATASETS[args.dataset_name](args, source)
    if not requests:
        raise BenchmarkError(
            f"{args.dataset_path} has no request within the limits: use another --dataset-path"
        )
    if len(requests) < args.num_prompts:
        print(f"Only {len(requests)} of {args.num_prompts} prompts: {args.dataset_path} has no more")
    return requests


def _random(args: argparse.Namespace, source: TextSource) -> list[SampleRequest]:
    """Lengths from ratio * length to length, inclusive, plus the prefix."""
    rng = np.random.default_rng(args.seed)
    ratio = args.random_range_ratio
    count = args.num_prompts
    inputs = _lengths(rng, args.random_input_len, ratio, count)
    outputs = _lengths(rng, args.random_output_len, ratio, count)
    wrap = None
    if args.use_chat_template:
        wrap = source.needed_tokenizer("random with --use-chat-template").as_chat
    return _random_requests(source, rng, inputs, outputs, args.random_prefix_len, wrap)


def _lengths(rng: np.random.Generator, length: int, ratio: float, count: int) -> list[int]:
    lengths: list[int] = rng.integers(max(1, int(length * ratio)), length, count, endpoint=True).tolist()
    return lengths


def _random_requests(
    source: TextSource,
    rng: np.random.Generator,
    inputs: list[int],
    outputs: list[int],
    prefix_len: int = 0,
    wrap: Callable[[str], str] | None = None,
) -> list[SampleRequest]:
    if source.tokenizer is None:
        ids = random_ids(rng, np.arange(source.vocab_size), inputs, prefix_len)
        return [SampleRequest(one, len(one), output) for one, output in zip(ids, outputs, strict=True)]
    tokens = stable_tokens(source.tokenizer, rng)
    ids = random_ids(rng, tokens, inputs, prefix_len)
    texts, lengths = exact_texts(source.tokenizer, ids, tokens, rng, wrap or str)
    missed = sum(len(one) != length for one, length in zip(ids, lengths, strict=True))
    if missed:
        print(f"{missed} of {len(ids)} prompts have another length than requested: their true lengths count")
    return [SampleRequest(*row) for row in zip(texts, lengths, outputs, strict=True)]


def _sharegpt(args: argparse.Namespace, source: TextSource) -> list[SampleRequest]:
    conversations = _read_json(args)
    turns = [_two_turns(conversation) for conversation in conversations]
    pairs = [pair for pair in turns if pair is not None]
    random.Random(args.seed).shuffle(pairs)
    return _within_limits(args, source.needed_tokenizer("sharegpt"), pairs, args.sharegpt_output_len)


def _two_turns(conversation: Any) -> tuple[str, str] | None:
    turns = conversation.get("conversations") or conversation.get("conversation") or []
    texts = [turn.get("value", turn.get("content")) for turn in turns[:2]]
    return (texts[0], texts[1]) if len(texts) == 2 and all(isinstance(text, str) for text in texts) else None


def _within_limits(
    args: argparse.Namespace,
    tokenizer: PromptTokenizer,
    pairs: list[tuple[str, str]],
    output_len: int | None,
) -> list[SampleRequest]:
    """The first pairs within the limits; the output length is that of the recorded answer."""
    chosen: list[SampleRequest] = []
    for start in range(0, len(pairs), args.num_prompts):
        part = pairs[start : start + args.num_prompts]
        prompts = tokenizer.encode_all([prompt for prompt, _ in part])
        answers = tokenizer.encode_all([answer for _, answer in part]) if output_len is None else prompts
        for (text, _), prompt, answer in zip(part, prompts, answers, strict=True):
            wanted = len(answer) if output_len is None else output_len
            too_short = len(prompt) < _MIN_TURN or (output_len is None and wanted < _MIN_TURN)
            too_long = len(prompt) > _MAX_PROMPT or len(prompt) + wanted > _MAX_TOTAL
            if not too_short and not too_long:
                chosen.append(SampleRequest(text, len(prompt), wanted))
        if len(chosen) >= args.num_prompts:
            break
    return chosen[: args.num_prompts]


def _burstgpt(args: argparse.Namespace, source: TextSource) -> list[SampleRequest]:
    """Answered requests to GPT-4, sampled with replacement only if there are too few."""
    path = _path(args)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [
                (int(row["Request tokens"]), int(row["Response tokens"]))
                for row in csv.DictReader(file)
                if row["Model"] == _BURST_MODEL
            ]
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise BenchmarkError(f"{path} is not a BurstGPT file: {error!r}") from None
    answered = [(asked, given) for asked, given in rows if asked > 0 and given > 0]
    if not answered:
        return []
    rng = np.random.default_rng(args.seed)
    again = len(answered) < args.num_prompts
    picked = rng.choice(len(answered), args.num_prompts, replace=again).tolist()
    inputs, outputs = zip(*(answered[i] for i in picked), strict=True)
    return _random_requests(source, rng, list(inputs), list(outputs))


def _sonnet(args: argparse.Namespace, source: TextSource) -> list[SampleRequest]:
    """Lines up to --sonnet-input-len; the first --sonnet-prefix-len tokens are common to all prompts."""
    tokenizer = source.needed_tokenizer("sonnet")
    lines = _read_text(args).splitlines(keepends=True)
    if not lines:
        return []
    wrap = str if args.backend == "openai-chat" else tokenizer.as_chat
    line_len = sum(map(len, tokenizer.encode_all(lines))) / len(lines)
    frame_len = len(tokenizer.encode(wrap(_POEM_INTRODUCTION)))
    common = round((args.sonnet_prefix_len - frame_len) / line_len)
    total = round((args.sonnet_input_len - frame_len) / line_len)
    if common < 0 or total <= common:
        raise BenchmarkError(
            f"--sonnet-prefix-len must be over {frame_len} tokens, the instruction and the template, and "
            "--sonnet-input-len larger still"
        )
    rng = random.Random(args.seed)
    prefix = rng.choices(lines, k=common)
    requests: list[SampleRequest] = []
    while len(requests) < args.num_prompts:
        body = "".join([_POEM_INTRODUCTION, *prefix, *rng.choices(lines, k=total - common)])
        text = wrap(body)
        requests.append(SampleRequest(text, len(tokenizer.encode(text)), args.sonnet_output_len))
    return requests


def _hf(args: argparse.Namespace, source: TextSource) -> list[SampleRequest]:
    """The first user turn of each row, with its image if it has one."""
    tokenizer = source.needed_tokenizer("hf")
    rows = _rows(args)
    requests: list[SampleRequest] = []
    for row in rows:
        if len(requests) == args.num_prompts:
            break
        pair = _two_turns(row)
        if pair is None:
            continue
        prompt, answer = (len(ids) for ids in tokenizer.encode_all(list(pair)))
        wanted = answer if args.hf_output_len is None else args.hf_output_len
        image = _image(row, args.backend)
        if wanted and prompt and (image or prompt + wanted <= _MAX_TOTAL):
            requests.append(SampleRequest(pair[0], prompt, wanted, image))
    return requests


def _rows(args: argparse.Namespace) -> Iterable[Any]:
    """The rows, shuffled by the seed; a dataset on the hub is streamed."""
    if not args.dataset_path:
        raise BenchmarkError("--dataset-name hf needs --dataset-path: a dataset on the hub, or a file")
    if Path(args.dataset_path).suffix in (".json", ".jsonl"):
        rows = _read_json(args)
        random.Random(args.seed).shuffle(rows)
        return rows
    try:
        from datasets import load_dataset
    except ModuleNotFoundError:
        raise BenchmarkError(
            f"{args.dataset_path} is not a .json or .jsonl file; for the hub, pip install datasets"
        ) from None
    try:
        dataset = load_dataset(
            args.dataset_path, name=args.hf_subset, split=args.hf_split or "train", streaming=True
        )
    except Exception as error:  # from the library that reads the dataset
        raise BenchmarkError(f"--dataset-path {args.dataset_path}: {error}") from error
    shuffled: Iterable[Any] = dataset.shuffle(seed=args.seed)
    return shuffled


def _image(row: Any, backend: str) -> dict[str, Any] | None:
    """A row's image as a content part of a chat message."""
    image = row.get("image")
    if image is None:
        return None
    if backend != "openai-chat":
        raise BenchmarkError(
            f"this dataset has images, which --backend {backend} does not take: use openai-chat"
        )
    if isinstance(image, str):
        return {"type": "image_url", "image_url": {"url": image}}
    return {"type": "image_url", "image_url": {"url": _data_url(image)}}


def _data_url(image: Any) -> str:
    """A Pillow image as a JPEG data URL."""
    import base64
    import io

    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="JPEG")
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _path(args: argparse.Namespace) -> Path:
    if not args.dataset_path:
        raise BenchmarkError(f"--dataset-name {args.dataset_name} needs --dataset-path, its file")
    return Path(args.dataset_path)


def _read_text(args: argparse.Namespace) -> str:
    path = _path(args)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchmarkError(f"--dataset-path {path}: {error}") from None


def _read_json(args: argparse.Namespace) -> list[Any]:
    """The objects of a JSON list, or of a file with one object per line."""
    text = _read_text(args)
    try:
        if Path(args.dataset_path).suffix == ".jsonl":
            rows = [json.loads(line) for line in text.splitlines() if line]
        else:
            rows = json.loads(text)
    except ValueError as error:
        raise BenchmarkError(f"--dataset-path {args.dataset_path} is not JSON: {error}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise BenchmarkError(f"--dataset-path {args.dataset_path}: it must be a list of conversations")
    return rows


DATASETS: dict[str, Callable[[argparse.Namespace, TextSource], list[SampleRequest]]] = {
    "sharegpt": _sharegpt,
    "burstgpt": _burstgpt,
    "sonnet": _sonnet,
    "random": _random,
    "hf": _hf,
}
