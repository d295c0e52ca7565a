"""The cost of one decode step on GPUs, of the workers without frontend and engine core.

    python -m benchmarks.decode_step --model PATH --load-dummy --rows 1 64 256

Rank 0 runs in this process, the others of `-tp` in processes of their own. For each number of rows:

  tokens      tokens by which a request advances: 1, and accepted drafts of --method
  device ms   device time of a step: steps queued back to back, timed by events
  ahead ms    time of a step as in serving: each is launched while the previous one runs
  launch ms   host time of launching a step
  kernels     kernels of a step, and of a layer

`--kernels` lists them with the runs and microseconds of each in a step. A kernel's time begins at
the end of the previous kernels of its stream, because with PDL it starts early and waits.
A step of R rows is a decode batch of R requests. With --method all of them have drafts in every step; random
weights need --spec-decode-acceptance-length to accept some.
"""

import contextlib
import json
from dataclasses import asdict

import msgspec

from atom import EngineArgs
from atom.shared.config.cli import CommandLineParser
from atom.shared.config.resolve import resolve
from atom.shared.utils.process import spawn
from atom.supervisor import Supervisor
from atom_ops import backend
from benchmarks.common.offline import forced_acceptance
from benchmarks.ranks.decode_step_rank import DecodeStepLaunch, Kernel, Row, measure_all
from benchmarks.ranks.rendezvous import open_rendezvous


def measure_ranks(launch: DecodeStepLaunch) -> list[tuple[Row, list[Kernel]]]:
    """The figures of rank 0; the other ranks are stopped with it."""
    ranks = launch.config.parallel.tensor_parallel_size
    with contextlib.ExitStack() as children, open_rendezvous(ranks) as places:
        for rank, where in list(enumerate(places))[1:]:
            other = msgspec.structs.replace(launch, rank=rank, where=where)
            children.callback(spawn("benchmarks.ranks.decode_step_rank", other).kill)
        return measure_all(msgspec.structs.replace(launch, where=places[0]))


def main() -> None:
    parser = CommandLineParser(prog="benchmarks.decode_step", description=__doc__)
    EngineArgs.add_cli_args(parser)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256], help="rows of the decode batch")
    parser.add_argument("--context", type=int, default=128, help="prompt tokens of each row")
    parser.add_argument("--steps", type=int, default=100, help="steps of each measurement")
    parser.add_argument("--kernels", action="store_true", help="list the kernels of a step")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    given = EngineArgs.from_cli_args(args)
    with Supervisor() as supervisor:
        checkpoint, capabilities, _ = supervisor.prepare(given.config.model)
    config = resolve(given.config, checkpoint, set(given.explicit), capabilities).config
    if config.device.device != "cuda" or config.parallel.data_parallel_size > 1:
        parser.error("this measures the workers of one engine on GPUs: it needs them, and -dp 1")
    results = measure_ranks(DecodeStepLaunch(config, checkpoint, args.rows, args.context, args.steps))
    if args.json:
        listed = [asdict(row) | {"times": [asdict(one) for one in kernels]} for row, kernels in results]
        print(json.dumps([forced_acceptance(args) | each for each in listed]))
        return
    print("rows  tokens  device ms  ahead ms  launch ms  kernels  a layer")
    for row, kernels in results:
        print(
            f"{row.rows:>4}  {row.tokens:>6.2f}  {row.device_ms:>9.3f}  {row.ahead_ms:>8.3f}"
            f"  {row.launch_ms:>9.3f}  {row.kernels:>7.0f}  {row.kernels_per_layer:>7.2f}"
        )
        if args.kernels:
            for one in kernels:
                print(f"      {one.microseconds:>8.1f} us  {one.runs:>4} x {one.name}")
    print(f"ops that fell back to torch: {', '.join(backend.ran_in_torch()) or 'none'}")


if __name__ == "__main__":
    main()
