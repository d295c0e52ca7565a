"""The preparation step: a process that turns a checkpoint into plain files, and examines the host."""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.model import ModelConfig
from atom.shared.config.resolve import DeviceCapabilities
from atom.shared.config.speculative import SpeculativeConfig
from atom.shared.messages.launch import PrepareLaunch
from atom.shared.utils import envs
from atom.shared.utils.exit_status import ExitStatus
from atom.shared.utils.process import spawn
from atom.supervisor.child import Child, how_it_ended
from atom.supervisor.failure import StartError
from atom.supervisor.life import Life, OnProgress
from atom.supervisor.process import Role

PREPARE_DEADLINE_S = 3600.0
_POLL_S = 0.1
_HANG_S = 60.0


class PrepareResult(msgspec.Struct, frozen=True):
    """The line that the preparation step prints: an error, or what it has found."""

    error: str = ""
    checkpoint: Checkpoint | None = None
    device: DeviceCapabilities | None = None
    draft_model: str | None = None


class Prepared(NamedTuple):
    """What the preparation step has found."""

    checkpoint: Checkpoint
    device: DeviceCapabilities
    """This host's GPUs and cores."""
    draft_model: str | None
    """Directory of --draft-model; None for a method without one."""


def prepare(
    life: Life, config: ModelConfig, speculative: SpeculativeConfig, on_turn: Callable[[], None]
) -> Prepared:
    """Run the step as a process of `life`, and call `on_turn` meanwhile; raises StartError."""
    launch = PrepareLaunch(config, envs.ATOM_CACHE_DIR, life.endpoint("supervisor"), speculative)
    process = spawn(Role.PREPARATION.value, launch, stdout=subprocess.PIPE)
    life.children["prepare"] = Child("prepare", Role.PREPARATION, process)
    task = f"preparing {config.model}"
    output = _output_of(life, process, task, on_turn)
    try:
        result = msgspec.json.decode(output, type=PrepareResult)
    except msgspec.DecodeError:
        raise StartError(f"{task} failed: {how_it_ended(process.returncode)}") from None
    if result.error or result.checkpoint is None or result.device is None:
        text = result.error or f"{task} returned no result"
        raise StartError(text, process.returncode or ExitStatus.FAILURE)
    return Prepared(result.checkpoint, result.device, result.draft_model)


def prepared(
    context: "zmq.Context[zmq.Socket[bytes]]",
    run_dir: Path,
    config: ModelConfig,
    speculative: SpeculativeConfig,
    on_progress: OnProgress,
    on_turn: Callable[[], None],
) -> Prepared:
    """Run the step in a life of its own. Raises StartError."""
    with contextlib.closing(Life(context, run_dir / "prepare", _HANG_S, on_progress)) as life:
        return prepare(life, config, speculative, on_turn)


def _output_of(life: Life, process: subprocess.Popen[bytes], task: str, on_turn: Callable[[], None]) -> bytes:
    """Everything the process prints until it ends; its progress messages are processed meanwhile."""
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    deadline = time.monotonic() + PREPARE_DEADLINE_S
    output = b""
    with process.stdout:
        while process.poll() is None:
            life.receive(_POLL_S)
            on_turn()
            output += process.stdout.read() or b""
            if time.monotonic() > deadline:
                raise StartError(f"{task} took longer than {PREPARE_DEADLINE_S:.0f} s")
        return output + (process.stdout.read() or b"")
