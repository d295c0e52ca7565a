"""How long a step takes, from what it reads, multiplies and sends.

    step = layers * launch + (read^p + multiply^p)^(1/p) + collectives

A GPU reads weights and KV cache while it multiplies, but not perfectly: p = 1 would be one after the
other, p = infinity the longer of both. p and the additional time of a layer were chosen for the decode
steps that were measured on an H200 (docs/operate/scaling.md compares them).

Tensor parallelism has two all-reduces a layer; of R ranks each sends 2 (R - 1) / R of the rows. Experts
spread over R ranks get each token once for each rank that has one of its experts, and return it.
"""

from dataclasses import dataclass
from math import comb, log2

from atom.benchmarks.serving.errors import BenchmarkError
from benchmarks.simulation.decoder import Decoder

__all__ = ["H200", "Device", "Layout", "Links", "Roofline", "Work"]


@dataclass(frozen=True)
class Links:
    """Links between GPUs. Seconds are those of an operation on little data, bytes those that a GPU sends."""

    gpus_per_node: int = 8
    node_bytes_per_s: float = 317e9
    """Rate of an all-reduce within a node: NCCL's bus bandwidth with two H200 (347e9 with four)."""
    exchange_bytes_per_s: float = 296e9
    """Rate of an all-to-all within a node: 4,096 tokens to 8 experts each on four H200, in 340 µs."""
    all_reduce_s: float = 5.1e-6
    """Time for two ranks in a decode step, waiting included: 0.37 ms for the 72 of Qwen3-8B."""
    all_to_all_s: float = 13e-6
    """NCCL's, of 16 tokens between four ranks."""
    network_bytes_per_s: float = 50e9
    """Between nodes: assumed, a network interface of 400 Gbit/s for each GPU."""
    network_s: float = 10e-6
    """What a collective takes longer between nodes: assumed."""

    def all_reduce(self, ranks: int, rows_bytes: float) -> float:
        """Seconds of an all-reduce; more than two ranks take longer by a half for each doubling (assumed)."""
        if ranks == 1:
            return 0.0
        sent = 2 * (ranks - 1) / ranks * rows_bytes
        base = self.all_reduce_s * (1 + log2(ranks)) / 2
        if ranks <= self.gpus_per_node:
            return base + sent / self.node_bytes_per_s
        return base + self.network_s + sent / self.network_bytes_per_s

    def all_to_all(self, ranks: int, bytes_to_each: float) -> float:
        """Seconds of an all-to-all in which each rank sends so much to each other one."""
        if ranks == 1:
            return 0.0
        near = min(ranks, self.gpus_per_node) - 1
        within = near * bytes_to_each / self.exchange_bytes_per_s
        far = ranks - 1 - near
        if not far:
            return self.all_to_all_s + within
        between = far * bytes_to_each / self.network_bytes_per_s
        return self.all_to_all_s + self.network_s + max(within, between)


@dataclass(frozen=True)
class Device:
    """One GPU."""

    name: str
    memory_bytes: float
    bytes_per_s: float
    """Rate of a stream of reads."""
    flops: float
    """Rate of a large GEMM."""
    layer_s: float
    """Additional time of each layer: launches, and kernels too short for their bytes to matter."""
    overlap: float
    """The exponent p of the module's formula."""
    prefill_share: float = 0.8
    """Share of `flops` that prompts reach: attention is slower than a GEMM."""
    usable: float = 0.85
    """The share of the memory for weights and KV cache."""


H200 = Device("H200", 150.7e9, 4475e9, 761e12, 20e-6, 1.2)


@dataclass(frozen=True)
class Layout:
    """`tp` GPUs are an engine, and `engines` serve. With `spread` they share experts, and step together."""

    tp: int = 1
    engines: int = 1
    spread: bool = False

    @property
    def gpus(self) -> int:
        return self.tp * self.engines

    @property
    def expert_ranks(self) -> int:
        """GPUs that a layer's experts are spread over."""
        return self.gpus if self.spread else 1


@dataclass(slots=True)
class Work:
    """What one engine computes in a step."""

    rows: int = 0
    """Decoding requests: a token each."""
    context: int = 0
    """Positions that they see, in all."""
    chunk_tokens: int = 0
    """Number of prompt tokens."""
    chunk_pairs: int = 0
    """Pairs of a prompt token and a position that it sees."""
    chunk_context: int = 0
    """Positions of the KV cache that the chunks read."""

    @property
    def tokens(self) -> int:
        return self.rows + self.chunk_tokens


@dataclass(frozen=True)
class Roofline:
    """A model on devices in a layout."""

    model: Decoder
    device: Device
    layout: Layout
    links: Links = Links()

    def weight_bytes(self) -> float:
        """Bytes of the weights on one GPU."""
        model = self.model
        layout = self.layout
        experts = model.experts / (layout.expert_ranks if layout.spread else layout.tp)
        return model.value_bytes * ((model.common + model.embedding) / layout.tp + experts)

    def kv_tokens(self) -> int:
        """What the KV cache of an engine holds. Raises BenchmarkError if the weights do not fit."""
        free = self.device.memory_bytes * self.device.usable - self.weight_bytes()
        if free <= 0:
            raise BenchmarkError(
                f"{self.model.name}: {self.weight_bytes() / 1e9:.0f} GB of weights do not fit a GPU with "
                f"{self.device.memory_bytes / 1e9:.0f} GB: use more GPUs for an engine, or spread the experts"
            )
        return int(free / (self.model.kv_bytes / self._kv_split))

    @property
    def _kv_split(self) -> int:
        return min(self.layout.tp, self.model.kv_copies_share)

    def seconds(self, work: Work, all_tokens: float = 0.0) -> float:
        """Duration of a step; `all_tokens`: of all engines that share the experts (0: each has as many)."""
        if not work.tokens and not all_tokens:
            return 0.0
        device = self.device
        p = device.overlap
        group = all_tokens or work.tokens * (self.layout.engines if self.layout.spread else 1)
        read = self.read_bytes(work, group) / device.bytes_per_s
        multiply = self.operations(work, group) / device.flops
        overlapped = (read**p + multiply**p) ** (1 / p)
        return float(self.model.layers * device.layer_s + overlapped + self.collective_seconds(work.tokens))

    def read_bytes(self, work: Work, all_tokens: float) -> float:
        """That a GPU reads in a step: weights of what runs, and KV cache."""
        model = self.model
        layout = self.layout
        tokens = all_tokens if layout.spread else work.tokens
        share = layout.expert_ranks if layout.spread else layout.tp
        experts = model.expert_layers * model.touched(tokens) * model.expert / share
        weights = model.value_bytes * (model.common / layout.tp + experts)
        return weights + (work.context + work.chunk_context) * model.kv_bytes / self._kv_split

    def operations(self, work: Work, all_tokens: float) -> float:
        """Floating-point operations of a GPU in a step, without the head of a prompt's last token.

        Those of prompts count as more, because they are slower.
        """
        model = self.model
        layout = self.layout
        slower = 1 / self.device.prefill_share
        tokens = work.rows + slower * work.chunk_tokens
        head = model.shape.hidden * model.shape.vocab
        common = 2.0 * ((model.common - head) * tokens + head * work.rows)
        chosen = 2.0 * model.expert_layers * model.shape.chosen * model.expert
        if layout.spread:
            chosen *= all_tokens / layout.expert_ranks * (tokens / work.tokens if work.tokens else 1.0)
        else:
            chosen *= tokens / layout.tp
        attention = model.attention_flops(work.context, slower * work.chunk_pairs)
        return (common + attention) / layout.tp + chosen

    # Collectives

    def ranks_of_a_token(self) -> float:
        """Expected number of other ranks that have an expert of a token."""
        ranks = self.layout.expert_ranks
        shape = self.model.shape
        if ranks == 1 or not shape.experts:
            return 0.0
        elsewhere = shape.experts - shape.experts // ranks
        return (ranks - 1) * (1.0 - comb(elsewhere, shape.chosen) / comb(shape.experts, shape.chosen))

    def tp_bytes(self) -> float:
        """That a GPU sends for a token and layer, in the all-reduces of tensor parallelism."""
        tp = self.layout.tp
        return 2 * 2 * (tp - 1) / tp * self.model.row_bytes

    def ep_bytes(self) -> float:
        """That a GPU sends for a token and MoE layer: dispatch, with ids and weights, and combine."""
        dispatched = self.model.row_bytes + 8 * self.model.shape.chosen
        return self.ranks_of_a_token() * (dispatched + self.model.row_bytes) / self.layout.tp

    def collective_seconds(self, tokens: float) -> float:
        """Time of the collectives in a step with `tokens` on each engine."""
        model = self.model
        layout = self.layout
        links = self.links
        total = 2 * model.layers * links.all_reduce(layout.tp, tokens * model.row_bytes)
        if layout.spread and layout.engines > 1 and model.shape.experts:
            ranks = layout.expert_ranks
            to_each = tokens * self.ep_bytes() / 2 / (ranks - 1)
            total += 2 * model.expert_layers * links.all_to_all(ranks, to_each)
        return total
