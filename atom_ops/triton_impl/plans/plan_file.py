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
from atom_ops.triton_impl.plans.linear_plans import Plan, Plans
from atom_ops.triton_impl.plans.plan_format import (
    FORMAT,
    Content,
    LinearEntry,
    Machine,
    QuantizedEntry,
    QuantizedKey,
    Shape,
    decode,
)
from atom_ops.triton_impl.quantized.quantized_plans import QuantizedPlan, QuantizedPlans

_DEADLINE_S = 600.0

Key = Shape | QuantizedKey
"""Key of a plain weight, or of a quantized one."""
Table = dict[Key, Plans | QuantizedPlans]


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
        content = Content(FORMAT, self._machine, [], [])
        for key, plans in sorted(table.items(), key=str):
            if len(key) == 2:
                content.linear.append(LinearEntry(*key, plans))  # type: ignore[arg-type]
            else:
                content.quantized.append(QuantizedEntry(key, plans))  # type: ignore[arg-type]
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
        found = decode(content)
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
