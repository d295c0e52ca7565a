"""Simulates many engines and their router: latencies, throughput and balance of a layout, without a GPU.

    python -m benchmarks.simulate --model Qwen3-8B --ranks 64 --requests 50000 --rate 1500
    python -m benchmarks.simulate --prefixes 64 --prefix-len 2048 --dp-load-balance prefix least_tokens
    python -m benchmarks.simulate --model DeepSeek-V3 --ranks 64 --enable-expert-parallel --rate 400

The scheduler, the KV cache manager and the router are those of the server. A step takes the time of a
roofline of the model on an H200 (docs/operate/scaling.md), and the clock is simulated: the same flags give
the same figures. With several policies, each of them gets the same requests. The host's own time, HTTP, and
engines that die are not simulated.
"""

import argparse
import gc
import resource
import time
from dataclasses import replace
from typing import Any, get_args

from tqdm import tqdm

from atom.benchmarks.serving.errors import BenchmarkError
from atom.shared.config.cli import CommandLineParser
from benchmarks.common.arguments import add_output_flag, not_negative, positive, single_line_errors
from benchmarks.common.report import report, write
from benchmarks.simulation.decoder import decoder
from benchmarks.simulation.engines import EngineSettings
from benchmarks.simulation.requests import Workload, requests
from benchmarks.simulation.roofline import H200, Layout, Links, Roofline
from benchmarks.simulation.simulate import Simulation
from engine_core.startup import default_mixed_tokens
from frontend.engine_client.dp_router import Policy

__all__ = ["simulate"]


def main() -> None:
    args = _parser().parse_args()
    with single_line_errors():
        rows = [simulate(args, policy) for policy in args.dp_load_balance]
        result = report("simulate", [], {"rows": rows})
        print("\n\n".join(map(text, rows)))
        write(args.output_json, result)


def _parser() -> CommandLineParser:
    parser = CommandLineParser(
        prog="benchmarks.simulate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    engines = parser.add_argument_group("engines").add_argument
    engines("--model", default="Qwen3-8B", help="shipped configuration, or directory with config.json")
    engines("--ranks", type=positive, default=8, help="engines (data-parallel ranks)")
    engines("--tensor-parallel-size", "-tp", type=positive, default=1, help="GPUs of an engine")
    engines("--enable-expert-parallel", action="store_true", help="spread the experts over all engines")
    engines("--max-num-seqs", type=positive, default=256, help="sequences that an engine runs at once")
    engines("--max-num-batched-tokens", type=positive, default=8192, help="tokens of a step")
    engines("--max-num-mixed-tokens", type=positive, help="... in which requests decode (default: ATOM's)")
    engines("--block-size", type=positive, default=16, help="tokens of a KV block")
    engines("--num-kv-blocks", type=positive, help="KV blocks of an engine (default: what fits an H200)")
    engines("--no-enable-prefix-caching", action="store_true", help="keep no blocks of ended requests")
    engines("--network-gbytes", type=positive, default=50, help="GB/s of a GPU to other nodes")
    routing = parser.add_argument_group("routing").add_argument
    policies = get_args(Policy)
    routing("--dp-load-balance", nargs="+", choices=policies, default=["prefix"], help="policies, in turn")
    routing("--frontends", type=positive, default=1, help="frontends, each with a router of its own")
    load = parser.add_argument_group("requests").add_argument
    load("--requests", type=positive, default=10000, help="how many")
    load("--rate", type=_rate, default=float("inf"), help="arrivals per second (default: all at once)")
    load("--input-len", type=positive, default=512, help="longest prompt, without a common prefix")
    load("--output-len", type=positive, default=128, help="longest output")
    load("--range-ratio", type=_share, default=0.5, help="shortest lengths, as a share of the longest")
    load("--prefixes", type=not_negative, default=0, help="common prefixes, of which each prompt has one")
    load("--prefix-len", type=not_negative, default=0, help="tokens of each")
    load("--seed", type=not_negative, default=0, help="seed of the requests")
    add_output_flag(parser)
    return parser


def simulate(args: argparse.Namespace, policy: Policy) -> dict[str, Any]:
    """One policy's row. Raises BenchmarkError or ValueError for settings that exclude each other."""
    if bool(args.prefixes) != bool(args.prefix_len):
        raise BenchmarkError("--prefixes and --prefix-len belong together: give both, or neither")
    model = decoder(args.model)
    if args.enable_expert_parallel and not model.shape.experts:
        raise BenchmarkError(f"{model.name} has no experts to spread: omit --enable-expert-parallel")
    layout = Layout(args.tensor_parallel_size, args.ranks, args.enable_expert_parallel)
    links = replace(Links(), network_bytes_per_s=args.network_gbytes * 1e9)
    roofline = Roofline(model, H200, layout, links)
    blocks = args.num_kv_blocks or roofline.kv_tokens() // args.block_size
    settings = EngineSettings(
        args.max_num_seqs,
        args.max_num_batched_tokens,
        blocks,
        args.block_size,
        not args.no_enable_prefix_caching,
        max_num_mixed_tokens=args.max_num_mixed_tokens
        or default_mixed_tokens(
            False, int(roofline.weight_bytes()), args.max_num_seqs, args.max_num_batched_tokens
        ),
    )
    workload = Workload(
        args.requests,
        args.rate,
        args.input_len,
        args.output_len,
        args.range_ratio,
        args.prefixes,
        args.prefix_len,
        model.shape.vocab,
        args.seed,
    )
    simulation = Simulation(
        settings, roofline.seconds, args.ranks, policy, args.frontends, args.enable_expert_parallel
    )
    # Nothing here is cyclic garbage, and a collection would look at all blocks of all engines.
    gc.disable()
    try:
        began = time.perf_counter()
        shown = tqdm(requests(workload), total=args.requests, desc=policy, leave=False, disable=None)
        outcome = simulation.run(shown, args.requests)
    finally:
        gc.enable()
    return {
        "policy": policy,
        "ranks": args.ranks,
        "num_kv_blocks": blocks,
        **outcome.to_dict(),
        "wall_seconds": time.perf_counter() - began,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def text(row: dict[str, Any]) -> str:
    """A policy's figures as text."""

    def times(name: str) -> str:
        figures = row[name]
        return ", ".join(f"{key} {figures[key] * 1e3:,.1f}" for key in ("mean", "p50", "p90", "p99"))

    return "\n".join(
        [
            f"{row['policy']}: {row['ranks']} engines, {row['requests']:,} requests in "
            f"{row['seconds']:,.1f} s (simulated in {row['wall_seconds']:,.0f} s with "
            f"{row['peak_rss_bytes'] / 1e9:.1f} GB)",
            f"  throughput  {row['requests_per_second']:,.1f} requests/s, "
            f"{row['output_tokens_per_second']:,.0f} output tokens/s",
            f"  ttft, ms    {times('ttft')}",
            f"  tpot, ms    {times('tpot')}",
            f"  engines     {row['busy']:.0%} busy, {row['steps']:,} steps, "
            f"{row['preemptions']:,} preemptions, the busiest computed {row['imbalance']:.2f} times the mean",
            f"  prompts     {row['cached_share']:.1%} of their tokens cached",
        ]
    )


def _rate(word: str) -> float:
    return _number(word, 1e-9, float("inf"))


def _share(word: str) -> float:
    return _number(word, 0.0, 1.0)


def _number(word: str, least: float, most: float) -> float:
    try:
        number = float(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number") from None
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"{word} is not between {least:g} and {most:g}")
    return number


if __name__ == "__main__":
    main()
