"""`python -m frontend.main`: the HTTP process, started by the supervisor."""

import asyncio
import gc
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from typing import Any

import uvloop
import zmq
from aiohttp import web

from atom.shared.messages.codec import encode
from atom.shared.messages.launch import FrontendLaunch
from atom.shared.messages.supervisor import INTERRUPT_SIGNAL, LAST_REPORT_MS, Dead, Heartbeat, Ready
from atom.shared.utils.errors import out_of_memory
from atom.shared.utils.exit_status import ExitStatus
from atom.shared.utils.liveness import HeartbeatSender, heartbeat_interval
from atom.shared.utils.logger import get_logger, setup_logging
from atom.shared.utils.process import read_launch
from atom.shared.utils.stack_dump import dump_stacks_on_signal
from frontend import keys
from frontend.app import create_app, start

__all__ = ["main", "serve"]

# A frontend that is started again finds its engines ready: the first requests wait for them to say so.
_ENGINES_ANSWER_S = 1.0
# For sending the error responses of requests that did not finish in time.
_LAST_RESPONSES_S = 2.0
_CONNECTIONS_POLL_S = 0.05


def main() -> None:
    """Exit status: 0 after SIGTERM, 1 if requests have failed since then or the server cannot start."""
    launch = read_launch(FrontendLaunch)
    setup_logging(launch.name, launch.state.log_level)
    try:
        dump_stacks_on_signal(launch.supervisor, launch.name)
        status = uvloop.run(serve(launch))
    except (OSError, ValueError, MemoryError, ImportError) as error:
        # A ValueError is about the checkpoint's tokenizer or template, an ImportError about a library.
        status = ExitStatus.MODEL if isinstance(error, ValueError) else ExitStatus.RESOURCES
        _report_death(launch.supervisor, Dead(launch.name, out_of_memory(error) or str(error), status))
        sys.exit(1)
    sys.exit(status)


async def serve(launch: FrontendLaunch) -> ExitStatus:
    """Serve requests until SIGTERM; then running requests get the shutdown timeout to finish.

    INTERRUPT_SIGNAL ends them at once. Once another server has the sockets, requests on open connections get
    that time; if that server dies meanwhile, connections are accepted again. Returns whether a request has
    failed for lack of an engine since the end began.
    """
    stop = _StopSignals()
    app = create_app(launch)
    replaces = launch.first_life > 0 and launch.life == 0
    patience_s = None if replaces else _ENGINES_ANSWER_S  # the server that it replaces accepts meanwhile
    runner = await start(app, socket.socket(fileno=launch.listen_fd), patience_s)
    gc.collect()
    gc.freeze()  # objects made so far live as long as the process
    try:
        ready = asyncio.create_task(_report_ready(app, launch))
        heartbeats = asyncio.create_task(_send_heartbeats(launch))
        failed_before = await _until_end(runner, launch.server.shutdown_timeout, stop)
        ready.cancel()
        heartbeats.cancel()
        has_failed = app[keys.CLIENT].num_failed > failed_before
        return ExitStatus.FAILURE if has_failed else ExitStatus.DONE
    finally:
        await runner.cleanup()


async def _until_end(runner: web.AppRunner, timeout_s: float, stop: "_StopSignals") -> int:
    """Serve until all requests have ended; returns how many had failed when the end began."""
    app = runner.app
    lifecycle, client = app[keys.LIFECYCLE], app[keys.CLIENT]
    while True:
        await _first(stop.drain.wait(), lifecycle.left.wait())
        failed_before = client.num_failed
        if not lifecycle.left.is_set():
            await _first(lifecycle.drain(timeout_s), stop.interrupt.wait())
            await _end_unfinished(app)
            return failed_before
        await _first(_no_connections(runner, timeout_s), lifecycle.stays.wait(), stop.drain.wait())
        if lifecycle.left.is_set():
            await _end_unfinished(app)
            await app[keys.SUPERVISOR].leave_streams(client.resumption.without_engine())
            return failed_before


async def _report_ready(app: web.Application, launch: FrontendLaunch) -> None:
    """Tell the supervisor, on a socket that stays: a busy one may take long to read it."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as status:
        status.setsockopt(zmq.LINGER, 0)
        status.connect(launch.supervisor)
        # No deadline here: the supervisor bounds the whole start.
        await app[keys.CLIENT].engines.wait_started()
        status.send(encode(Ready(launch.name)), zmq.DONTWAIT)
        await asyncio.Event().wait()  # until it is cancelled


async def _send_heartbeats(launch: FrontendLaunch) -> None:
    """A sign of life from the event loop, for the supervisor."""
    interval = heartbeat_interval(launch.config.reliability.hang_timeout)
    with zmq.Context() as context:
        heartbeat = Heartbeat(launch.name)
        heartbeats = HeartbeatSender(context, zmq.PUSH, launch.supervisor, lambda: heartbeat, interval)
        try:
            while True:
                heartbeats.send_if_due()
                await asyncio.sleep(interval)
        finally:
            heartbeats.close()


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait until one of them ends; the others are cancelled."""
    tasks = [asyncio.create_task(each) for each in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


async def _no_connections(runner: web.AppRunner, timeout_s: float) -> None:
    """Wait until no connection is open, at most `timeout_s`: the next response on each closes it."""
    assert runner.server is not None
    deadline = time.monotonic() + timeout_s
    while runner.server.connections and time.monotonic() < deadline:
        await asyncio.sleep(_CONNECTIONS_POLL_S)


async def _end_unfinished(app: web.Application) -> None:
    """End the requests that are left."""
    unfinished = app[keys.LIFECYCLE].running
    if unfinished:
        get_logger().warning("stopping with %d requests unfinished", unfinished)
        await app[keys.LIFECYCLE].interrupt(_LAST_RESPONSES_S)


class _StopSignals:
    """SIGTERM starts draining; INTERRUPT_SIGNAL ends it, also before it has started."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.interrupt = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(INTERRUPT_SIGNAL, self._interrupt)
        loop.add_signal_handler(signal.SIGTERM, self.drain.set)

    def _interrupt(self) -> None:
        self.drain.set()
        self.interrupt.set()


def _report_death(supervisor: str, message: Dead) -> None:
    context = zmq.Context()
    with context.socket(zmq.PUSH) as status:
        status.setsockopt(zmq.LINGER, LAST_REPORT_MS)
        status.connect(supervisor)
        status.send(encode(message), zmq.DONTWAIT)
    context.term()


if __name__ == "__main__":
    main()
