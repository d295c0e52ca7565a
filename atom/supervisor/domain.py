"""A failure domain: processes that start, end and restart together."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from dataclasses import dataclass

import zmq

from atom.shared.config.engine import EngineConfig
from atom.shared.messages.nodes import NodeInfo
from atom.shared.utils.logger import get_logger
from atom.supervisor.failure import Failure, Restarts
from atom.supervisor.life import Life, OnProgress
from atom.supervisor.node import Node
from atom.supervisor.placement import Placement


@dataclass(frozen=True)
class DomainSettings:
    """What all failure domains are started with."""

    context: "zmq.Context[zmq.Socket[bytes]]"
    nodes: Mapping[int, Node]
    """By rank; a node that was lost is replaced when it has joined again."""
    placement: Placement
    config: EngineConfig
    on_progress: OnProgress
    secret: bytes = b""
    """The cluster secret; empty on one node."""
    first_life: int = 0
    """As in FrontendLaunch."""

    @property
    def local(self) -> NodeInfo:
        """The node of the supervisor."""
        return self.nodes[0].info


class Domain(ABC):
    """Its lives, restart generations, are numbered from 0; between two of them it is down."""

    def __init__(self, name: str, settings: DomainSettings, nodes: Set[int] = frozenset({0})):
        """`nodes` are the ranks of the nodes that it runs on."""
        self.name = name
        self.nodes = nodes
        self.life: Life | None = None
        self.number = -1
        """The number of the latest life."""
        self.last_failure: Failure | None = None
        self._first_failure: Failure | None = None  # of those in a row
        self._settings = settings
        self._restarts = Restarts(settings.config.reliability.max_restarts)
        self._start_at: float | None = None
        self._was_ready = False
        self.is_planned = False
        """Whether an administrator has ended the latest life that has ended."""

    @abstractmethod
    def _open(self, number: int) -> Life:
        """A life without processes."""

    @abstractmethod
    def _launch(self, life: Life) -> None:
        """Start the processes of a life."""

    @abstractmethod
    def _send_exit_reason(self, life: Life, failure: Failure) -> None:
        """Tell processes that still run why the life ends; called before they are killed."""

    def start(self) -> None:
        """Start the next life. Raises OSError or ZMQError when a process or a socket cannot be made."""
        self.number += 1
        self._start_at = None
        self._was_ready = False
        self.life = self._open(self.number)
        self._launch(self.life)

    def restart(self) -> None:
        """As `start`, but a start without a process is a failure of the domain."""
        try:
            self.start()
        except (OSError, zmq.ZMQError) as error:
            reason = f"{self.name} cannot be started: {error}"
            self.fail(Failure(reason, reason), restart=True)

    @property
    def is_ready(self) -> bool:
        """Whether its current life is ready."""
        return self.life is not None and self.life.is_ready

    @property
    def is_due(self) -> bool:
        """Whether its next life must start now: its delay is over, and all its nodes take part."""
        return self._start_at is not None and time.monotonic() >= self._start_at and not self.absent

    @property
    def absent(self) -> str:
        """Why it cannot start: one of its nodes is lost; empty if all take part."""
        return next(
            (node.lost for rank in sorted(self.nodes) if (node := self._settings.nodes[rank]).lost), ""
        )

    @property
    def label(self) -> str:
        """Its name for people, with its nodes unless that is this node alone."""
        if self.nodes == {0}:
            return self.name
        where = (f"node {rank} ({self._settings.nodes[rank].info.address})" for rank in sorted(self.nodes))
        return f"{self.name} on {' and '.join(where)}"

    @property
    def is_down_for_now(self) -> bool:
        """Whether it is down and its next life is planned."""
        return self._start_at is not None

    @property
    def responds(self) -> bool:
        """Whether no process of its current life is silent."""
        return self.life is not None and self.life.responds

    @property
    def is_over(self) -> bool:
        """Whether it is down, and no next life is planned."""
        return self.life is None and self._start_at is None

    @property
    def cause(self) -> str:
        """Why it is over: its last failure, and the first of those in a row, which may have caused it."""
        assert self.last_failure is not None and self._first_failure is not None, "it has failed"
        last, first = self.last_failure.text, self._first_failure.text
        count = self._restarts.in_a_row + 1
        return last if last == first else f"{last}; the first of {count} failures in a row: {first}"

    def failure(self) -> Failure | None:
        """Why the current life has failed; None while it has not. Logs when a later life gets ready."""
        if self.life is None:
            return None
        if self.life.is_ready and not self._was_ready:
            self._was_ready = True
            if self.number:
                seconds = time.monotonic() - self.life.started_at
                get_logger().info("%s, life %d, is ready after %.1f s", self.name, self.number, seconds)
        return self.life.failure()

    def keep_stacks(self, failure: Failure) -> None:
        """After a hang, save the stacks of the processes of the current life."""
        if failure.is_hang and self.life is not None:
            self.life.keep_stacks(f"{self.label}, life {self.number}: {failure.text}")

    def end(self, failure: Failure) -> None:
        """End what is left of the current life."""
        if self.life is not None:
            self._send_exit_reason(self.life, failure)
            self.life.close()
        self.life = None
        self.last_failure = failure
        self.is_planned = False

    def fail(self, failure: Failure, restart: bool) -> None:
        """End the current life; with `restart`, plan the next one unless too many have failed in a row."""
        ready_s = 0.0 if self.life is None else self.life.ready_s
        delay = self._restarts.delay(ready_s) if restart else None
        if self._first_failure is None or (delay is not None and self._restarts.in_a_row == 1):
            self._first_failure = failure
        self.end(failure)
        if delay is not None:
            self._start_at = time.monotonic() + delay
            plan = f"life {self.number + 1} starts in {delay:.0f} s"
        elif restart:
            plan = f"not started again after {self._restarts.in_a_row} restarts in a row"
        else:
            plan = "not started again"
        get_logger().error("%s, life %d, has ended: %s; %s", self.name, self.number, failure.text, plan)

    def stay_down(self) -> None:
        """Start no further life."""
        self._start_at = None

    def close(self) -> None:
        """Kill the present life."""
        self.stay_down()
        if self.life is not None:
            self.life.close()
            self.life = None
