"""Runs one script in several processes, the ranks of a mesh. Every process is killed at the end.

One process loads torch and forks the ranks, so that the import is paid once. They join once torch is
loaded: a rank's deadline is not spent on imports.
"""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

import msgspec

from atom.shared.messages.launch import Rendezvous
from benchmarks.ranks.rendezvous import open_rendezvous

DEADLINE_S = 240.0
# Keyed by rank: `wheres`, `outputs`. The loop's `else` runs in the first process, what follows in each rank.
_PREAMBLE = """
    import faulthandler, os, signal, sys, msgspec, torch
    from atom.shared.messages.launch import Rendezvous
    from parallel.mesh import MeshShape, join_mesh
    torch.set_num_threads(1)
    timeout = float(sys.argv[1])
    shape = MeshShape(*msgspec.json.decode(sys.argv[2]))
    wheres = msgspec.json.decode(sys.argv[3], type=dict[int, Rendezvous | None])
    outputs = msgspec.json.decode(sys.argv[4], type=dict[int, tuple[int, int]])
    loaded, begin = map(int, sys.argv[5:])
    os.close(loaded)
    os.read(begin, 1)
    children = []
    listening = [each for where in wheres.values() if where for each in where.pass_fds]
    for rank, where in wheres.items():
        child = os.fork()
        if not child:
            break
        children.append(child)
    else:
        for each in listening:
            os.close(each)
        print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
        sys.exit()
    for each in set(listening) - set(where.pass_fds if where else ()):
        os.close(each)
    for stream, file in zip((1, 2), outputs[rank]):
        os.dup2(file, stream)
    faulthandler.register(signal.SIGUSR1)
    mesh = join_mesh(shape, rank, where, torch.device("cpu"), timeout)
"""


@dataclass(frozen=True)
class _Family:
    """A process that forks ranks, and two files of each rank: its standard output and its standard error."""

    process: subprocess.Popen[str]
    files: list[tuple[IO[str], IO[str]]]

    def finish(self, deadline: float) -> list[tuple[int, str, str]]:
        try:
            out, err = self.process.communicate(timeout=deadline)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"the ranks have not ended within {deadline:g} s:\n{self._stacks()}"
            ) from None
        assert self.process.returncode == 0, err
        statuses = msgspec.json.decode(out, type=list[int])
        return [
            (status, _content(files[0]), _content(files[1]))
            for status, files in zip(statuses, self.files, strict=True)
        ]

    def _stacks(self) -> str:
        """Standard error of all ranks, after a signal upon which they print their threads' stacks there."""
        os.killpg(self.process.pid, signal.SIGUSR1)
        time.sleep(1)
        return "\n".join(_content(err)[-5000:] for _, err in self.files)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate(timeout=DEADLINE_S)
        for files in self.files:
            for file in files:
                file.close()


def _content(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


class Ranks:
    """The processes; the script finds `mesh`, `rank` and `shape`."""

    def __init__(self) -> None:
        self._families: list[_Family] = []
        # Each is at its end once all writers have closed it: the processes, and this one.
        self._all_loaded, self._loaded = os.pipe()
        self._begin, self._hold = os.pipe()
        self._open = [self._all_loaded, self._loaded, self._begin, self._hold]

    def start(self, body: str, tp: int = 1, dp: int = 1, timeout: float = DEADLINE_S, life: int = 0) -> None:
        """Start tp x dp processes, whose joining and collectives have `timeout` seconds."""
        with open_rendezvous(tp * dp, life) as places:
            self._start(body, dict(enumerate(places)), (tp, dp), timeout)

    def start_one(
        self, body: str, rank: int, place: Rendezvous, shape: Sequence[int], timeout: float = DEADLINE_S
    ) -> None:
        self._start(body, {rank: place}, shape, timeout)

    def _start(
        self, body: str, places: Mapping[int, Rendezvous | None], shape: Sequence[int], timeout: float
    ) -> None:
        files = [(tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")) for _ in places]
        outputs = {rank: (out.fileno(), err.fileno()) for rank, (out, err) in zip(places, files, strict=True)}
        passed = [file for pair in outputs.values() for file in pair]
        passed += [each for place in places.values() if place is not None for each in place.pass_fds]
        gate = self._loaded, self._begin
        script = textwrap.dedent(_PREAMBLE) + textwrap.dedent(body)
        encoded = [msgspec.json.encode(each).decode() for each in (shape, places, outputs)]
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(timeout), *encoded, *map(str, gate)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pass_fds=(*passed, *gate),
            start_new_session=True,
        )  # fmt: skip
        self._families.append(_Family(process, files))

    def join(self) -> None:
        """Let the processes join, once all have started; `finish` does it, too."""
        if self._hold in self._open:
            self._close(self._loaded)
            os.read(self._all_loaded, 1)
            self._close(self._hold)

    def finish(self, deadline: float = DEADLINE_S) -> list[tuple[int, str, str]]:
        """(exit status, standard output, standard error) of each; `deadline` in seconds."""
        self.join()
        return [end for family in self._families for end in family.finish(deadline)]

    def outputs(self, deadline: float = DEADLINE_S) -> list[str]:
        """The standard output of each; every one must end well, and without a warning."""
        ends = self.finish(deadline)
        assert all((status, err) == (0, "") for status, _, err in ends), ends
        return [out for _, out, _ in ends]

    def kill(self) -> None:
        for descriptor in tuple(self._open):
            self._close(descriptor)
        for family in self._families:
            family.kill()

    def _close(self, descriptor: int) -> None:
        self._open.remove(descriptor)
        os.close(descriptor)
