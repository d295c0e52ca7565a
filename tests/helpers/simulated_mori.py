"""MORI on the CPU, as its documentation describes it: fixed buffers, sums over ranks.

Their signatures are held against the published package elsewhere (tests/arch/test_contracts.py).
"""

import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from parallel.communicator import Communicator
from parallel.mesh import Mesh

COMPUTE_UNITS = 64


class KernelType(Enum):
    IntraNode = 0
    InterNodeV1 = 1


class SimulatedOp:
    """One rank's op; the buffers hold NaN where nothing arrived, and every dispatch overwrites them."""

    ep: Communicator

    def __init__(self, config: SimpleNamespace):
        assert config.kernel_type is KernelType.IntraNode and config.block_num == COMPUTE_UNITS
        assert (config.rank, config.world_size) == (self.ep.rank, self.ep.size)
        self._config = config
        most = config.world_size * config.max_num_inp_token_per_rank
        self._x = torch.empty(most, config.hidden_dim)
        self._weights = torch.empty(most, config.num_experts_per_token)
        self._ids = torch.empty(most, config.num_experts_per_token, dtype=torch.int32)

    def dispatch(
        self, *, input: Tensor, weights: Tensor, scales: None, indices: Tensor
    ) -> tuple[Tensor, Tensor, None, Tensor, Tensor]:
        assert indices.dtype == torch.int32 and weights.dtype == torch.float32
        assert len(input) <= self._config.max_num_inp_token_per_rank
        ranks = self._config.world_size
        assert ((indices >= 0) & (indices < ranks * self._config.num_experts_per_rank)).all()
        owners = indices // self._config.num_experts_per_rank
        sent = [(owners == rank).any(1).nonzero().flatten() for rank in range(ranks)]
        counts, each = torch.tensor([len(rows) for rows in sent]), [1] * ranks
        self._sent, self._received = sent, self.ep.all_to_all_rows(counts, each, each).tolist()
        arrived = sum(self._received)
        for buffer, rows in ((self._x, input), (self._weights, weights), (self._ids, indices)):
            buffer.fill_(torch.nan if buffer.is_floating_point() else 1)
            buffer[:arrived] = self.ep.all_to_all_rows(rows[torch.cat(sent)], counts.tolist(), self._received)
        return self._x, self._weights, None, self._ids, torch.tensor([arrived], dtype=torch.int32)

    def combine(self, *, input: Tensor, weights: None, indices: Tensor) -> tuple[Tensor, None]:
        out = torch.full((self._config.max_num_inp_token_per_rank, input.shape[1]), torch.nan)
        out[: len(indices)] = 0
        counts = [len(rows) for rows in self._sent]
        returned = self.ep.all_to_all_rows(input[: sum(self._received)], self._received, counts)
        return out.index_add_(0, torch.cat(self._sent), returned), None


def install(mesh: Mesh) -> None:
    """Import `mori` as this simulation, for the ranks of `mesh`, on GPUs that this host does not have."""
    SimulatedOp.ep = mesh.ep
    torch.cuda.device_count = lambda: 8
    properties: Any = SimpleNamespace(multi_processor_count=COMPUTE_UNITS)
    torch.cuda.get_device_properties = lambda device=None: properties
    package, ops, shmem = (ModuleType(name) for name in ("mori", "mori.ops", "mori.shmem"))
    vars(ops).update(
        EpDispatchCombineOp=SimulatedOp,
        EpDispatchCombineConfig=SimpleNamespace,
        EpDispatchCombineKernelType=KernelType,
    )
    vars(shmem).update(
        MORI_SHMEM_INIT_WITH_UNIQUEID=1,
        shmem_get_unique_id=lambda: b"an id",
        shmem_init_attr=_check_id,
    )
    vars(package).update(ops=ops, shmem=shmem)
    sys.modules |= {"mori": package, "mori.ops": ops, "mori.shmem": shmem}


def _check_id(*, flags: int, rank: int, nranks: int, unique_id: bytes) -> None:
    assert flags == 1 and rank < nranks and unique_id == b"an id"
