"""The launch message of each kind of child process: one frame on its standard input.

The pipe stays open: its end means that the parent has ended.
"""

import msgspec

from atom.config.checkpoint import Checkpoint
from atom.config.engine import EngineConfig
from atom.config.model import ModelConfig
from atom.config.server import ServerConfig


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
    core: str
    supervisor: str
    listen_fd: int
    """The listening TCP socket, inherited."""
    index: int = 0


class PrepareLaunch(msgspec.Struct, frozen=True):
    """For `python -m workers.prepare`."""

    config: ModelConfig
    cache_dir: str
    """Where converted checkpoints are kept."""
    supervisor: str
