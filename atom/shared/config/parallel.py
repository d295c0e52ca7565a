"""How the model is split over processes."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from atom.shared.config.fields import OBJECT

All2AllBackend = Literal["auto", "allgather_reducescatter", "alltoall", "mori"]


@dataclass(frozen=True)
class ParallelConfig:
    tensor_parallel_size: Annotated[int, Meta(ge=1)] = 1
    """Number of workers that every layer is split over."""
    decode_context_parallel_size: Annotated[int, Meta(ge=1)] = 1
    """Number of tensor-parallel workers that split the KV cache of MLA by tokens; divides -tp."""
    data_parallel_size: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Number of engines; a request runs on one. Each has the whole model, unless they share experts."""
    enable_expert_parallel: bool = False
    """Spread whole experts over the workers of all engines, which then step together."""
    enable_dp_attention: bool = False
    """Make each worker an engine that shares only the experts: -dp becomes dp x tp, and -tp 1."""
    all2all_backend: All2AllBackend = "auto"
    """How tokens reach the experts of other data-parallel ranks; auto chooses by the tokens of a step."""
    enable_eplb: bool = False
    """Move experts between ranks while requests run, so that all ranks get about as many tokens."""
    eplb_config: Annotated[str, OBJECT] | None = None
    """JSON object; '{"window_size": 1000, "step_interval": 3000, "num_redundant_experts": 0}' if unset."""
    prefill_engines: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Engines of --data-parallel-size that only compute prompts; the others go on from the last tier."""
    prefill_min_tokens: Annotated[int, Meta(ge=0)] = 512
    """Shorter prompts are computed by the engines that generate: to move their blocks takes longer."""
    dp_load_balance: Literal["prefix", "least_tokens", "least_requests", "round_robin"] = "prefix"
    """Chooses a request's data-parallel rank; prefix prefers one that has computed the prompt's prefix."""
    nnodes: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Number of nodes that the workers are spread over: one `atom-launch` on each, with its --node-rank."""
    port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    """First internal TCP port of this node; free ones if unset. Alone on one node it is the HTTP port."""

    @property
    def num_workers(self) -> int:
        """Workers of all engines."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def workers_per_node(self) -> int:
        """Workers of each node."""
        return self.num_workers // self.nnodes

    def world_rank(self, engine: int, worker: int) -> int:
        """Counts the workers of all engines."""
        return engine * self.tensor_parallel_size + worker

    @property
    def lockstep(self) -> bool:
        """Whether the engines share experts, and so launch their steps together."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def engines_in_mesh(self) -> int:
        """Engines whose workers run collectives together."""
        return self.data_parallel_size if self.lockstep else 1

    @property
    def workers_in_mesh(self) -> int:
        """Workers that run collectives together."""
        return self.tensor_parallel_size * self.engines_in_mesh

    def layout(self, device: str) -> str:
        """The engines and their workers in words; `device` is what each worker runs on."""
        engines = self.data_parallel_size
        one = f"{self.tensor_parallel_size} x {device}"
        if self.decode_context_parallel_size > 1:
            one += f" (each {self.decode_context_parallel_size} split the KV cache by tokens)"
        text = one if engines == 1 else f"{engines} engines of {one}"
        if self.enable_expert_parallel and self.num_workers > 1:
            text += f", experts spread over {self.num_workers} workers"
        return f"{text}, on {self.nnodes} nodes" if self.nnodes > 1 else text
