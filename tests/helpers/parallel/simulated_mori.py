"""MORI on the CPU: its published signatures, and the semantics that its documentation and sources describe.

    install(mesh)     `import mori` finds it, with GPUs that this host does not have

A call must fit the signature; its arguments then reach the function of the same name here, which takes no
argument that it does not know. Buffers have a fixed size and are written in place: what nothing has filled is
NaN, and the tokens of a dispatch arrive in a random order.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from parallel.communicator import Communicator
from parallel.mesh import Mesh
from tests.helpers.parallel.signatures import parsed, published

COMPUTE_UNITS = 80
"""Those of an MI308X: less than the blocks that MORI would launch by itself."""
UNIQUE_ID = bytes(range(128))
_INITIALISED_BY_ID = 1
_KINDS = ("IntraNode", "InterNode", "InterNodeV1", "InterNodeV1LL", "AsyncLL", "IntraNodeLL")
KernelType = Enum("KernelType", {name: number for number, name in enumerate(_KINDS)})

Swap = tuple[str, str, str]
"""A function, and two of its arguments that a call confuses."""


class Simulation:
    """One process's MORI: which ranks there are, its heap, and what was called."""

    def __init__(self, ep: Communicator, swap: Swap | None):
        self.ep = ep
        self.calls: Counter[str] = Counter()
        self.compiled: set[Any] = set()
        self.heap = 0
        self._swap = swap
        self._signatures = published()

    def function(self, name: str, semantics: Callable[..., Any]) -> Callable[..., Any]:
        """`semantics`, reached through the published signature of `name`."""
        signature = parsed(self._signatures[name])

        def call(*args: Any, **kwargs: Any) -> Any:
            given = dict(signature.bind(*args, **kwargs).arguments)
            if self._swap and self._swap[0] == name:
                first, second = self._swap[1:]
                given[first], given[second] = given[second], given[first]
            self.calls[name] += 1
            return semantics(**given)

        return call

    def take(self, *buffers: Tensor | int) -> None:
        """Symmetric memory of these sizes."""
        for each in buffers:
            self.heap -= each if isinstance(each, int) else each.nbytes
        assert self.heap >= 0, "out of static heap memory"

    def init_attr(self, flags: int, rank: int, nranks: int, unique_id: bytes) -> int:
        assert (flags, rank, nranks) == (_INITIALISED_BY_ID, self.ep.rank, self.ep.size)
        assert unique_id == UNIQUE_ID
        return 0

    def warm_up(self, kernel_type: Any) -> None:
        assert isinstance(kernel_type, KernelType)
        self.compiled.add(kernel_type)

    def open(self, config: SimpleNamespace) -> "SimulatedOp":
        if not self.heap:
            size = os.environ["MORI_SHMEM_HEAP_SIZE"]
            assert size.endswith("G")
            self.heap = int(size[:-1]) << 30
        return SimulatedOp(config, self)


def _config(
    data_type: torch.dtype,
    rank: int,
    world_size: int,
    hidden_dim: int,
    scale_dim: int,
    scale_type_size: int,
    max_token_type_size: int,
    max_num_inp_token_per_rank: int,
    num_experts_per_rank: int,
    num_experts_per_token: int,
    warp_num_per_block: int,
    block_num: int,
    kernel_type: Any,
    gpu_per_node: int,
    rdma_block_num: int,
    num_qp_per_pe: int,
) -> SimpleNamespace:
    assert data_type in (torch.float32, torch.bfloat16) and max_token_type_size == data_type.itemsize
    assert 0 <= rank < world_size and world_size % gpu_per_node == 0 and gpu_per_node.bit_count() == 1
    assert (kernel_type.name.startswith("InterNode")) <= (gpu_per_node < world_size)
    assert (kernel_type.name == "IntraNode") <= (gpu_per_node == world_size)
    assert scale_dim == scale_type_size == 0, "no scales are sent"
    assert 0 < num_experts_per_token <= world_size * num_experts_per_rank and num_experts_per_token < 64
    assert (kernel_type.name == "AsyncLL") == (num_qp_per_pe == 2) and num_qp_per_pe in (1, 2)
    _check_launch(block_num, warp_num_per_block)
    assert (kernel_type.name == "IntraNode") == (rdma_block_num == 0) and rdma_block_num < block_num
    return SimpleNamespace(
        dtype=data_type,
        rank=rank,
        ranks=world_size,
        nodes=world_size // gpu_per_node,
        hidden=hidden_dim,
        most=max_num_inp_token_per_rank,
        experts=num_experts_per_rank,
        chosen=num_experts_per_token,
        kind=kernel_type,
        launch=(block_num, rdma_block_num, warp_num_per_block),
    )


def _check_launch(blocks: int, warps: int) -> None:
    """Blocks wait for one another, so that all must run at once; a block has up to 1024 threads."""
    assert 0 < blocks <= COMPUTE_UNITS and warps in (4, 8, 16)


class SimulatedOp:
    """One rank's op."""

    def __init__(self, config: SimpleNamespace, simulation: Simulation):
        assert config.kind in simulation.compiled, "compiled before the ranks connect"
        assert (config.rank, config.ranks) == (simulation.ep.rank, simulation.ep.size)
        self._config, self._ep = config, simulation.ep
        most = config.ranks * config.most
        self._x = torch.empty(most, config.hidden, dtype=config.dtype)
        self._weights = torch.empty(most, config.chosen)
        self._ids = torch.empty(most, config.chosen, dtype=torch.int32)
        self._sums = torch.empty(config.most, config.hidden, dtype=config.dtype)
        self._arrived = torch.empty(1, dtype=torch.int32)
        simulation.take(self._x, self._sums, *[self._weights] * 3, *[self._ids] * 2, *self._on_the_way())
        self._order = torch.Generator().manual_seed(config.rank)
        self._pending: Callable[[], None] | None = None
        self._open = False
        for name in ("dispatch", "combine", "dispatch_send", "dispatch_recv", "combine_send", "combine_recv"):
            function = simulation.function(f"mori.ops.EpDispatchCombineOp.{name}", getattr(self, f"_{name}"))
            setattr(self, name, function)

    def _on_the_way(self) -> list[int]:
        """Bytes of the buffers for messages: a row, its ids and weights, and the token's number."""
        c = self._config
        message = c.hidden * c.dtype.itemsize + 8 * c.chosen + 4
        all_ranks, nodes = c.ranks * c.most * message, c.nodes * c.most * message
        origins = c.ranks * c.most * c.experts * 4
        match c.kind.name:
            case "IntraNode":
                return [origins, all_ranks]
            case "AsyncLL":
                return [origins, all_ranks, all_ranks, all_ranks]
        return [origins, all_ranks, nodes, 2 * nodes, c.most * message]

    def _dispatch(
        self,
        input: Tensor,
        weights: Tensor,
        scales: None,
        indices: Tensor,
        block_num: int,
        rdma_block_num: int,
        warp_per_block: int,
    ) -> tuple[Tensor, Tensor, None, Tensor, Tensor]:
        self._check_call(block_num, rdma_block_num, warp_per_block)
        self._post(input, weights, scales, indices)
        self._receive()
        return self._x, self._weights, None, self._ids, self._arrived

    def _dispatch_send(
        self,
        input: Tensor,
        weights: Tensor,
        scales: None,
        indices: Tensor,
        block_num: int,
        warp_per_block: int,
    ) -> tuple[Tensor, Tensor, None, Tensor, Tensor]:
        self._check_call(block_num, None, warp_per_block)
        self._post(input, weights, scales, indices)
        return self._x, self._weights, None, self._ids, self._arrived

    def _dispatch_recv(self, block_num: int, warp_per_block: int) -> None:
        self._check_call(block_num, None, warp_per_block)
        self._receive()

    def _combine(
        self,
        input: Tensor,
        weights: None,
        indices: Tensor,
        block_num: int,
        rdma_block_num: int,
        warp_per_block: int,
    ) -> tuple[Tensor, None]:
        self._check_call(block_num, rdma_block_num, warp_per_block)
        self._post_sums(input, weights, indices)
        self._receive()
        return self._sums, None

    def _combine_send(
        self, input: Tensor, weights: None, indices: Tensor, block_num: int, warp_per_block: int
    ) -> tuple[Tensor, None]:
        self._check_call(block_num, None, warp_per_block)
        self._post_sums(input, weights, indices)
        return self._sums, None

    def _combine_recv(self, block_num: int, warp_per_block: int) -> None:
        self._check_call(block_num, None, warp_per_block)
        self._receive()

    def _check_call(self, blocks: int, rdma_blocks: int | None, warps: int) -> None:
        assert (self._config.kind.name == "AsyncLL") == (rdma_blocks is None)
        _check_launch(blocks, warps)
        assert rdma_blocks is None or rdma_blocks == self._config.launch[1]

    def _post(self, x: Tensor, weights: Tensor, scales: None, ids: Tensor) -> None:
        c = self._config
        assert not self._open and self._pending is None and scales is None, "combine comes first"
        assert ids.dtype == torch.int32 and weights.dtype == torch.float32 and x.dtype == c.dtype
        assert ids.shape == weights.shape == (len(x), c.chosen) and x.shape[1] == c.hidden
        assert all(each.is_contiguous() for each in (x, weights, ids)) and len(x) <= c.most
        assert ((ids >= 0) & (ids < c.ranks * c.experts)).all()
        for buffer in (self._x, self._weights):
            buffer.fill_(torch.nan)
        self._ids.fill_(1)
        self._arrived.fill_(-1)
        owners = ids // c.experts
        self._sent = [(owners == rank).any(1).nonzero().flatten() for rank in range(c.ranks)]
        self._own_ids = ids.clone()
        sent = [each[torch.cat(self._sent)] for each in (x, weights, ids)]
        self._pending = lambda: self._deliver(sent)

    def _deliver(self, sent: list[Tensor]) -> None:
        counts, each = torch.tensor([len(rows) for rows in self._sent]), [1] * self._config.ranks
        self._received = self._ep.all_to_all_rows(counts, each, each).tolist()
        arrived = sum(self._received)
        self._permuted = torch.randperm(arrived, generator=self._order)
        for buffer, rows in zip((self._x, self._weights, self._ids), sent, strict=True):
            buffer[self._permuted] = self._ep.all_to_all_rows(rows, counts.tolist(), self._received)
        self._arrived.fill_(arrived)
        self._open = True

    def _post_sums(self, outputs: Tensor, weights: None, ids: Tensor) -> None:
        assert self._open and self._pending is None and weights is None, "the experts apply the weights"
        assert torch.equal(ids, self._own_ids), "the ids that this rank gave to dispatch"
        assert outputs.is_contiguous() and outputs.dtype == self._config.dtype
        assert outputs.shape[1] == self._config.hidden and len(outputs) >= sum(self._received)
        self._sums.fill_(torch.nan)
        self._open = False
        returned = outputs[self._permuted]
        self._pending = lambda: self._sum(returned)

    def _sum(self, returned: Tensor) -> None:
        counts = [len(rows) for rows in self._sent]
        found = self._ep.all_to_all_rows(returned, self._received, counts)
        own = self._sums[: len(self._own_ids)].zero_()
        own.index_add_(0, torch.cat(self._sent), found)

    def _receive(self) -> None:
        assert self._pending is not None, "nothing was sent"
        finish, self._pending = self._pending, None
        finish()


def install(mesh: Mesh, swap: Swap | None = None) -> Simulation:
    """Import `mori` as this simulation, for the ranks of `mesh`, on GPUs that this host does not have."""
    simulation = Simulation(mesh.ep, swap)
    properties: Any = SimpleNamespace(multi_processor_count=COMPUTE_UNITS)
    torch.cuda.get_device_properties = lambda device=None: properties
    names = ("mori", "mori.ops", "mori.ops.dispatch_combine", "mori.shmem")
    modules = {name: ModuleType(name) for name in names}
    for name, semantics in semantics_of(simulation).items():
        home, _, own = name.rpartition(".")
        setattr(modules[home], own, simulation.function(name, semantics))
    for name in names[1:]:
        home, _, own = name.rpartition(".")
        setattr(modules[home], own, modules[name])
    vars(modules["mori.ops"])["EpDispatchCombineKernelType"] = KernelType
    vars(modules["mori.shmem"])["MORI_SHMEM_INIT_WITH_UNIQUEID"] = _INITIALISED_BY_ID
    sys.modules |= modules
    return simulation


def semantics_of(simulation: Simulation) -> Mapping[str, Callable[..., Any]]:
    """What each function does; the methods of an op are `SimulatedOp`'s."""
    return {
        "mori.ops.EpDispatchCombineOp": simulation.open,
        "mori.ops.EpDispatchCombineConfig": _config,
        "mori.ops.dispatch_combine.warmup_jit_kernels": simulation.warm_up,
        "mori.shmem.shmem_get_unique_id": lambda: UNIQUE_ID,
        "mori.shmem.shmem_init_attr": simulation.init_attr,
    }
