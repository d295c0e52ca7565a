"""Copies of KV blocks between a GPU and a tier, alone and next to decode steps.

    python -m benchmarks.kv_tiers --model benchmarks/models/Qwen3-8B --load-dummy
    python -m benchmarks.kv_tiers --model benchmarks/models/Qwen3-8B --load-dummy --kv-offload-dir DIR

Of the worker, without frontend and engine core; one GPU. The tier is pinned host memory, or with
--kv-offload-dir files. Blocks go down and come back --rounds times, then decode steps run in turns:

    alone        milliseconds of a step, each launched while the previous one runs
    next to up   the same, while blocks come back all the time; and their GB/s
    next to down the same, while blocks go down all the time

`link` is the rate of one large copy from pinned memory to the GPU. --part-bytes and --torch-rows say what the
size of a part, and the kernel that copies the blocks of all layers, change.
"""

import itertools
import statistics
import time
from collections.abc import Callable

import torch

from atom import EngineArgs
from atom.shared.config.cli import CommandLineParser
from atom.shared.config.resolve import resolve
from atom.shared.messages.kv_tiers import DISK, HOST_MEMORY, BlockCopy, BlocksCopied, CopyBlocks, TierSlots
from atom.shared.messages.worker import stored_bytes
from atom.supervisor import Supervisor
from atom_ops import gather_block_rows, scatter_block_rows
from benchmarks.common.arguments import add_output_flag, positive, single_line_errors
from benchmarks.common.report import report, write
from benchmarks.ranks.decode_step_rank import DecodeStepLaunch, Steps
from workers.memory.host_tier import HostTier
from workers.memory.tier_copier import TierCopier

_LINK_BYTES = 1 << 30
_DEADLINE_S = 60.0
_POLL_S = 0.0002


class Copies:
    """Copies of the last blocks of the cache, which no row uses, to a tier and back."""

    def __init__(self, copier: TierCopier, num_blocks: int, count: int, block_bytes: int):
        self._copier = copier
        self.bytes = count * block_bytes
        self._numbers = itertools.count(1)
        self._copies = [
            BlockCopy(
                0, num_blocks - 1 - index, index, index.to_bytes(8, "little"), index.to_bytes(8, "little")
            )
            for index in range(count)
        ]

    def start(self, up: bool) -> None:
        """Begin to copy all blocks: `up` from the tier."""
        self._copier.submit(CopyBlocks(next(self._numbers), 0, up, self._copies))

    def done(self) -> bool:
        """Whether the copies that were begun have ended. Raises RuntimeError if a block failed."""
        if (copied := self._copier.next_copied()) is None:
            return False
        if isinstance(copied, BlocksCopied) and copied.failed:
            raise RuntimeError(f"{len(copied.failed)} blocks could not be copied: see the log")
        return True

    def rate(self, up: bool) -> float:
        """GB/s of all blocks, with nothing else on the GPU. Raises RuntimeError after a minute."""
        started = time.perf_counter()
        self.start(up)
        while not self.done():
            if time.perf_counter() - started > _DEADLINE_S:
                raise RuntimeError(f"blocks were not copied within {_DEADLINE_S:g} s")
            time.sleep(_POLL_S)
        return self.bytes / (time.perf_counter() - started) / 1e9


def link_rate() -> float:
    """GB/s of one large copy from pinned memory, the best of five."""
    source = torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(_LINK_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return _LINK_BYTES / min(times) / 1e9


def steps_with(steps: Steps, copies: Copies, up: bool | None, count: int) -> tuple[float, float]:
    """(milliseconds of a step, GB/s of the copies next to them); `up` None: without copies."""
    done = 0
    if up is not None:
        copies.start(up)
    started = time.perf_counter()
    earlier = steps.launch()
    for _ in range(count):
        later = steps.launch()
        earlier.result()
        earlier = later
        if up is not None and copies.done():
            done += 1
            copies.start(up)
    earlier.result()
    seconds = time.perf_counter() - started
    while up is not None and not copies.done():
        time.sleep(_POLL_S)
    return seconds / (count + 1) * 1e3, done * copies.bytes / seconds / 1e9


def main() -> None:
    parser = CommandLineParser(prog="benchmarks.kv_tiers", description=__doc__)
    EngineArgs.add_cli_args(parser)
    add = parser.add_argument
    add("--rows", type=positive, default=64, help="rows of the decode batch")
    add("--context", type=positive, default=1024, help="prompt tokens of each row")
    add("--steps", type=positive, default=100, help="steps of each measurement")
    add("--blocks", type=positive, default=512, help="blocks of a copy")
    add(
        "--part-bytes",
        type=positive,
        help="bytes that host memory copies at a time (16 MiB, at most 128 MiB)",
    )
    add("--torch-rows", action="store_true", help="copy blocks with torch's ops, a layer at a time")
    add("--rounds", type=positive, default=5, help="rounds; a figure is their median")
    add_output_flag(parser)
    args = parser.parse_args()
    given = EngineArgs.from_cli_args(args)
    with single_line_errors():
        with Supervisor() as supervisor:
            checkpoint, capabilities, _ = supervisor.prepare(given.config.model)
        config = resolve(given.config, checkpoint, set(given.explicit), capabilities).config
        if (
            config.device.device != "cuda"
            or config.parallel.workers_per_node * config.parallel.data_parallel_size > 1
        ):
            parser.error("this measures one GPU")
        medium = DISK if config.cache.kv_offload_dir is not None else HOST_MEMORY
        if args.part_bytes is not None:
            if medium != HOST_MEMORY:
                parser.error("--part-bytes is for host memory: leave out --kv-offload-dir")
            HostTier.part_bytes = args.part_bytes
        launch = DecodeStepLaunch(config, checkpoint, [args.rows], args.context, args.steps)
        steps = Steps(launch, [TierSlots(medium, [args.blocks])])
        if args.torch_rows:
            for op in (gather_block_rows, scatter_block_rows):
                op.use(["torch"])
        figures = measure(steps, args.rows, args.context, args.steps, args.blocks, args.rounds)
        result = report("kv_tiers", [torch.cuda.get_device_name()], {"medium": medium, **figures})
        for name, value in figures.items():
            print(f"{name:<24}{value:>10.2f}" if isinstance(value, float) else f"{name:<24}{value:>10}")
        write(args.output_json, result)


def measure(
    steps: Steps, rows: int, context: int, count: int, blocks: int, rounds: int
) -> dict[str, float | int]:
    """Every figure, as a median."""
    copier = steps.worker.tiers
    assert copier is not None and len(steps.specs) == 1, "the tier of a model with one kind of layers"
    copies = Copies(copier, steps.num_blocks[0], blocks, stored_bytes(steps.specs[0]))
    steps.start(rows, context, (3 * rounds + 1) * (count + 2) + 16)

    def median(measured: Callable[[], float]) -> float:
        return statistics.median(measured() for _ in range(rounds))

    copies.rate(up=False)  # the first one also pins memory, or makes files
    figures: dict[str, float | int] = {"block_bytes": copies.bytes // blocks, "link_gb_s": link_rate()}
    figures["down_gb_s"] = median(lambda: copies.rate(up=False))
    figures["up_gb_s"] = median(lambda: copies.rate(up=True))
    steps_with(steps, copies, None, count)
    turns = [[steps_with(steps, copies, up, count) for up in (None, True, False)] for _ in range(rounds)]
    for place, name in enumerate(("alone", "next_to_up", "next_to_down")):
        figures[f"{name}_ms"] = statistics.median(turn[place][0] for turn in turns)
        if place:
            figures[f"{name}_gb_s"] = statistics.median(turn[place][1] for turn in turns)
    return figures


if __name__ == "__main__":
    main()
