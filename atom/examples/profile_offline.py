"""Generate one batch with profiling on all workers, and print the paths of the traces.

python -m atom.examples.profile_offline --model PATH --bs 4 --input-length 128 --output-length 32
"""

import argparse
import random
from dataclasses import replace

from atom import EngineArgs, LLMEngine, SamplingParams
from atom.shared.config.cli import CommandLineParser

DEFAULT_DIRECTORY = "./profiler_traces"
TEXT = (
    "A river begins as rain on a hill. It gathers in small streams, and the streams meet in the valley, "
    "where an old town stands on both banks. "
)


def main() -> None:
    parser = CommandLineParser(description=__doc__)
    EngineArgs.add_cli_args(parser)
    parser.add_argument("--input-length", type=_positive, default=128, help="Tokens of each prompt.")
    parser.add_argument("--output-length", type=_positive, default=32, help="Tokens to generate for each.")
    parser.add_argument("--bs", type=_positive, default=1, help="How many prompts run together.")
    parser.add_argument("--random-input", action="store_true", help="Random token ids instead of a text.")
    args = parser.parse_args()
    with _with_directory(EngineArgs.from_cli_args(args)).create_engine() as engine:
        prompts = _prompts(engine, args.bs, args.input_length, args.random_input)
        engine.generate([prompts[0][:8]], SamplingParams(max_tokens=4, ignore_eos=True))
        engine.start_profile()
        params = SamplingParams(temperature=0.6, max_tokens=args.output_length, ignore_eos=True)
        outputs = engine.generate(prompts, params)
        for path in engine.stop_profile():
            print(path)
    tokens_in = sum(output["num_tokens_input"] for output in outputs)
    tokens_out = sum(output["num_tokens_output"] for output in outputs)
    print(f"{len(outputs)} prompts, {tokens_in} tokens in, {tokens_out} out")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def _with_directory(args: EngineArgs) -> EngineArgs:
    traces = args.config.observability
    if traces.torch_profiler_dir is not None:
        return args
    return replace(
        args,
        config=replace(args.config, observability=replace(traces, torch_profiler_dir=DEFAULT_DIRECTORY)),
    )


def _prompts(engine: LLMEngine, count: int, length: int, at_random: bool) -> list[list[int]]:
    """Prompts with different beginnings, so that none is found in the prefix cache."""
    if at_random or engine.tokenizer is None:
        generator = random.Random(0)
        vocabulary = engine.checkpoint.vocab_size
        return [[generator.randrange(vocabulary) for _ in range(length)] for _ in range(count)]
    texts = [f"{number}. " + TEXT * length for number in range(count)]
    return [engine.tokenizer.encode(text)[:length] for text in texts]


if __name__ == "__main__":
    main()
