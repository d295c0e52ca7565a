"""The launch message of each kind of child process: one frame on its standard input.

The pipe stays open: its end means that the parent has ended.
"""

import msgspec

from atom.config.checkpoint import Checkpoint
from atom.config.engine import EngineConfig
from atom.config.model import ModelConfig
from atom.config.server import ServerConfig


class EngineAddress(msgspec.Struct, frozen=True, array_like=True):
    """One life of the engine of a data-parallel rank."""

    rank: int
    life: int
    """Counts the starts of this rank's engine, from 0."""
    endpoint: str
    """ZMQ endpoint of its core's frontend socket. It contains rank and life (`core-1.3`), so that no
    message of an earlier life can reach a later one."""


class WorkerLaunch(msgspec.Struct, frozen=True):
    """For `python -m workers.main`."""

    config: EngineConfig
    checkpoint: Checkpoint
    rank: int
    core: str
    """ZMQ endpoint of the core's worker socket."""
    supervisor: str
    """ZMQ endpoint of the supervisor's socket."""
    rendezvous: str
    """File for the rendezvous of the tensor-parallel ranks (a torch FileStore)."""


class CoreLaunch(msgspec.Struct, frozen=True):
    """For `python -m engine_core.process`."""

    config: EngineConfig
    checkpoint: Checkpoint
    frontends: str
    """ZMQ endpoint to bind for frontends."""
    workers: str
    """ZMQ endpoint to bind for workers."""
    supervisor: str


class FrontendLaunch(msgspec.Struct, frozen=True):
    """For `python -m frontend.main`."""

    config: EngineConfig
    server: ServerConfig
    checkpoint: Checkpoint
    engines: list[EngineAddress]
    """The engines at this moment; later changes come through `control`."""
    supervisor: str
    listen_fd: int
    """The listening TCP socket, inherited."""
    index: int = 0
    """Number of this frontend, from 0."""
    num_frontends: int = 1
    """They share the port, and the limits of admission in equal parts."""
    control: str = ""
    """ZMQ endpoint of the supervisor's ROUTER that sends `Engines`; empty: the engines never change."""
    metrics_dir: str = ""
    """Directory in which each frontend keeps its counters in a file for the others; empty: none does."""


class PrepareLaunch(msgspec.Struct, frozen=True):
    """For `python -m workers.prepare`."""

    config: ModelConfig
    cache_dir: str
    """Where converted checkpoints are kept."""
    supervisor: str
