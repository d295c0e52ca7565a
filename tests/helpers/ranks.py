"""Runs one script in several processes, the ranks of a mesh. Every process is killed at the end.

The processes join once all have loaded torch, so that a rank's deadline is not spent on waiting for imports.
"""

import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence

import msgspec

from atom.shared.messages.launch import Rendezvous
from atom.shared.utils.rendezvous import open_rendezvous

DEADLINE_S = 240.0
_PREAMBLE = """
    import os, sys, msgspec, torch
    from atom.shared.messages.launch import Rendezvous
    from parallel.mesh import MeshShape, join_mesh
    torch.set_num_threads(1)
    rank, timeout = int(sys.argv[1]), float(sys.argv[2])
    shape = MeshShape(*msgspec.json.decode(sys.argv[3]))
    where = msgspec.json.decode(sys.argv[4], type=Rendezvous)
    loaded, begin = map(int, sys.argv[5:])
    os.close(loaded)
    os.read(begin, 1)
    mesh = join_mesh(shape, rank, where, torch.device("cpu"), timeout)
"""


class Ranks:
    """The processes; the script finds `mesh`, `rank` and `shape`."""

    def __init__(self) -> None:
        self._children: list[subprocess.Popen[str]] = []
        # Each is at its end once all writers have closed it: the processes, and this one.
        self._all_loaded, self._loaded = os.pipe()
        self._begin, self._hold = os.pipe()
        self._open = [self._all_loaded, self._loaded, self._begin, self._hold]

    def start(self, body: str, tp: int = 1, dp: int = 1, timeout: float = DEADLINE_S, life: int = 0) -> None:
        """Start tp x dp processes, whose joining and collectives have `timeout` seconds."""
        with open_rendezvous(tp * dp, life) as places:
            for rank, place in enumerate(places):
                assert place is not None
                self.start_one(body, rank, place, (tp, dp), timeout)

    def start_one(
        self, body: str, rank: int, place: Rendezvous, shape: Sequence[int], timeout: float = DEADLINE_S
    ) -> None:
        script = textwrap.dedent(_PREAMBLE) + textwrap.dedent(body)
        encoded = [msgspec.json.encode(each).decode() for each in (shape, place)]
        gate = self._loaded, self._begin
        child = subprocess.Popen(
            [sys.executable, "-c", script, str(rank), str(timeout), *encoded, *map(str, gate)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pass_fds=(*place.pass_fds, *gate),
        )  # fmt: skip
        self._children.append(child)

    def join(self) -> None:
        """Let the processes join, once all have started; `finish` does it, too."""
        if self._hold in self._open:
            self._close(self._loaded)
            os.read(self._all_loaded, 1)
            self._close(self._hold)

    def finish(self, deadline: float = DEADLINE_S) -> list[tuple[int, str, str]]:
        """(exit status, standard output, standard error) of each; `deadline` in seconds."""
        self.join()
        ends = []
        for child in self._children:
            out, err = child.communicate(timeout=deadline)
            ends.append((child.returncode, out, err))
        return ends

    def outputs(self, deadline: float = DEADLINE_S) -> list[str]:
        """The standard output of each; every one must end well, and without a warning."""
        ends = self.finish(deadline)
        assert all((status, err) == (0, "") for status, _, err in ends), ends
        return [out for _, out, _ in ends]

    def kill(self) -> None:
        for descriptor in tuple(self._open):
            self._close(descriptor)
        for child in self._children:
            child.kill()
            child.communicate(timeout=DEADLINE_S)

    def _close(self, descriptor: int) -> None:
        self._open.remove(descriptor)
        os.close(descriptor)
