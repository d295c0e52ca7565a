"""Failure domains whose processes are lines of Python."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import zmq

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.engine import EngineConfig
from atom.shared.config.server import ServerConfig
from atom.shared.messages.codec import encode
from atom.shared.messages.nodes import NodeInfo
from atom.shared.messages.supervisor import ToSupervisor
from atom.supervisor.child import Child
from atom.supervisor.domain import Domain, DomainSettings
from atom.supervisor.failure import Failure
from atom.supervisor.life import Life
from atom.supervisor.node import LocalNode
from atom.supervisor.placement import Placement
from atom.supervisor.process import Role

SLEEP = "import time; time.sleep(60)"
CHECKPOINT = Checkpoint("", "LlamaForCausalLM", "llama", {}, "float32", 64, max_model_len=100)


ROLES = {"core": Role.CORE, "frontend": Role.FRONTEND}


def add_child(life: Life, name: str, code: str) -> Child:
    """A child that runs `code`; its name has its role."""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    role = next((ROLES[word] for word in name.split() if word in ROLES), Role.WORKER)
    life.children[name] = Child(name, role, process)
    return life.children[name]


def send(life: Life, *messages: ToSupervisor) -> None:
    """As the life's children do, and wait until they have arrived."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(life.endpoint("supervisor"))
        for message in messages:
            socket.send(encode(message))
        assert life.socket.poll(60_000)


def settings_in(
    directory: Path,
    context: "zmq.Context[zmq.Socket[bytes]]",
    config: EngineConfig,
    server: ServerConfig | None = None,
) -> DomainSettings:
    """The settings of one node."""
    info = NodeInfo(0, "127.0.0.1", "lo", str(directory), config, CHECKPOINT, server or ServerConfig(), {})
    nodes = {0: LocalNode(info, context)}
    return DomainSettings(context, nodes, Placement(config.parallel), config, lambda progress: None)


class ScriptDomain(Domain):
    """Life n has one process, which runs `codes[n]`, or the last of them."""

    def __init__(self, name: str, settings: DomainSettings, codes: Sequence[str] = (SLEEP,)):
        super().__init__(name, settings)
        self.codes = codes
        self.exit_reasons: list[str] = []

    def _open(self, number: int) -> Life:
        return Life(self._settings.context, Path(self._settings.local.run_dir, f"{self.name}.{number}"), 60.0)

    def _launch(self, life: Life) -> None:
        add_child(life, "core", self.codes[min(self.number, len(self.codes) - 1)])

    def _send_exit_reason(self, life: Life, failure: Failure) -> None:
        self.exit_reasons.append(failure.text)


@contextmanager
def zmq_context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)
