"""The file of GEMM plans that were measured on this machine.

<cache directory>/tuned/NVIDIA-L40S-torch-2.11.0-triton-3.6.0.json        the plans
<cache directory>/tuned/NVIDIA-L40S-torch-2.11.0-triton-3.6.0.json.lock   lock, with the progress
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import msgspec

from atom.shared.utils.file_lock import exclusive
from atom.shared.utils.logger import get_logger
from atom.shared.utils.trusted_path import REMEDY, distrusted
from atom_ops.triton_impl.plans.tuned import Plan, Plans
from atom_ops.triton_impl.quantized.quantized_plans import Key as QuantizedKey
from atom_ops.triton_impl.quantized.quantized_plans import QuantizedPlan, QuantizedPlans

# Raise it whenever the kernels or the candidate plans change.
_FORMAT = 7
_DEADLINE_S = 600.0

Shape = tuple[int, int]
"""Output features, input features of a weight."""
Key = Shape | QuantizedKey
"""Of a plain weight, or of a quantized one."""
Table = dict[Key, Plans | QuantizedPlans]


class Machine(msgspec.Struct, frozen=True):
    """What the measured times depend on; driver updates are ignored."""

    gpu: str
    torch: str
    triton: str


class _Entry(msgspec.Struct):
    outputs: int
    inputs: int
    plans: Plans


class _QuantizedEntry(msgspec.Struct):
    weight: QuantizedKey
    plans: QuantizedPlans


class _Content(msgspec.Struct):
    format: int
    machine: Machine
    linear: list[_Entry]
    quantized: list[_QuantizedEntry]


class PlanFile:
    """Read by every worker; written by the one that holds the lock. Methods raise OSError."""

    def __init__(
        self, cache_dir: Path, machine: Machine, known: Callable[[Key, Plan | QuantizedPlan], bool]
    ) -> None:
        """`known` returns whether a plan is valid for these kernels."""
        parts = (machine.gpu, "torch", machine.torch, "triton", machine.triton)
        name = "-".join(re.sub(r"[^A-Za-z0-9.+]+", "-", part) for part in parts)
        self.path = cache_dir / "tuned" / f"{name}.json"
        self._lock = self.path.with_name(f"{self.path.name}.lock")
        self._machine = machine
        self._known = known

    def read(self) -> Table:
        """The stored plans; empty, with a warning, if the file is invalid or other users can write it."""
        if problem := distrusted(self.path):
            get_logger().warning(
                "%s is not used, plans are measured anew: %s; %s", self.path, problem, REMEDY
            )
            return {}
        try:
            return self._table(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            get_logger().warning("%s is not used, plans are measured anew: %s", self.path, error)
            return {}

    def write(self, table: Table) -> None:
        """Replace the file atomically."""
        content = _Content(_FORMAT, self._machine, [], [])
        for key, plans in sorted(table.items(), key=str):
            if len(key) == 2:
                content.linear.append(_Entry(*key, plans))  # type: ignore[arg-type]
            else:
                content.quantized.append(_QuantizedEntry(key, plans))  # type: ignore[arg-type]
        encoded = msgspec.json.encode(content)
        partial = self.path.with_name(f"{self.path.name}.{os.getpid()}.partial")
        try:
            partial.write_bytes(msgspec.json.format(encoded, indent=1) + b"\n")
            partial.replace(self.path)
        finally:
            partial.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self, on_wait: Callable[[int, int], None]) -> Iterator[Callable[[int, int], None]]:
        """Hold the lock among all workers of all engines; yields a function to publish (done, total).

        A waiting worker gets the published progress through `on_wait`. Raises TimeoutError after
        ten minutes.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)

        def pass_on() -> None:
            done, _, total = self._lock.read_text().partition(" ")
            if done.isdigit() and total.isdigit():
                on_wait(int(done), int(total))

        with exclusive(self._lock, _DEADLINE_S, pass_on) as file:
            yield lambda done, total: _note(file, f"{done} {total}")

    def _table(self, content: bytes) -> Table:
        found = msgspec.json.decode(content, type=_Content)
        if found.format != _FORMAT:
            raise ValueError(f"its format is {found.format}, this version's {_FORMAT}")
        if found.machine != self._machine:
            raise ValueError(f"it was measured on another machine or with other versions: {found.machine}")
        table: Table = {(entry.outputs, entry.inputs): entry.plans for entry in found.linear}
        table |= {entry.weight: entry.plans for entry in found.quantized}
        for shape, plans in table.items():
            for plan in plans:
                if not self._known(shape, plan):
                    raise ValueError(f"its plan for {shape} is not a candidate: {plan}")
        return table


def _note(file: TextIO, text: str) -> None:
    file.truncate(0)
    file.write(text)
    file.flush()
