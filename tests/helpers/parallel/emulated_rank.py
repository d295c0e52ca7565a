"""AITER and MORI on the CPUs of several ranks: emulated in torch, with their published signatures."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import msgspec
import pytest

from parallel.mesh import Mesh
from parallel.rendezvous import MeetingPoint
from tests.aiter_contract.package import install as install_aiter
from tests.helpers.parallel import layout_rank, simulated_mori
from tests.helpers.parallel.signatures import published


def run_all(path: Path, rank: int, meeting: MeetingPoint | None) -> None:
    """As `layout_rank.run_all`; also prints how often each function of the libraries was called, by job."""
    counts: list[Counter[str]] = []
    layout_rank.run_all(path, rank, _libraries(counts), meeting)
    print(msgspec.json.encode(counts).decode())


def _libraries(counts: list[Counter[str]]) -> Callable[[Mesh], AbstractContextManager[None]]:
    @contextmanager
    def around(mesh: Mesh) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            group = mesh.tp._group if mesh.tp.size > 1 else None
            aiter = install_aiter(patch, published(), group=group)
            patch.setattr("parallel.peer_memory._reach_each_other", lambda group, device: True)
            mori = simulated_mori.install(mesh)
            patch.setattr("parallel.expert.choose.mori_problem", lambda device: None)
            # Fewer than a prompt's chunk, so that steps run the kernels for many tokens, too.
            patch.setattr("parallel.expert.mori_plan.LOW_LATENCY_TOKENS", 4)
            yield
            counts.append(aiter + mori.calls)

    return around
