"""`python -m frontend.main`: the HTTP process, started by the supervisor."""

import asyncio
import gc
import signal
import socket
import sys

import uvloop
import zmq
from aiohttp import web

from atom.shared.messages.codec import encode
from atom.shared.messages.launch import FrontendLaunch
from atom.shared.messages.supervisor import Dead, Heartbeat, Ready, ToSupervisor
from atom.shared.utils.errors import out_of_memory
from atom.shared.utils.exit_status import ExitStatus
from atom.shared.utils.liveness import HeartbeatSender, heartbeat_interval
from atom.shared.utils.logger import get_logger, setup_logging
from atom.shared.utils.process import read_launch
from atom.shared.utils.stack_dump import dump_stacks_on_signal
from frontend import keys
from frontend.app import create_app, start

__all__ = ["main", "serve"]

_STATUS_LINGER_MS = 1000
# A frontend that is started again finds its engines ready: the first requests wait for them to say so.
_ENGINES_ANSWER_S = 1.0
# For sending the error responses of requests that did not finish in time.
_LAST_RESPONSES_S = 2.0


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
        _report(launch.supervisor, Dead(launch.name, out_of_memory(error) or str(error), status))
        sys.exit(1)
    sys.exit(status)


async def serve(launch: FrontendLaunch) -> ExitStatus:
    """Serve requests until SIGTERM; then running requests get the shutdown timeout to finish.

    A second SIGTERM ends them at once. Returns whether one has failed since the first, for lack of an engine.
    """
    stop = _StopSignal()
    app = create_app(launch)
    runner = await start(app, socket.socket(fileno=launch.listen_fd), _ENGINES_ANSWER_S)
    gc.collect()
    gc.freeze()  # objects made so far live as long as the process
    try:
        ready = asyncio.create_task(_report_ready(app, launch))
        heartbeats = asyncio.create_task(_send_heartbeats(launch))
        await stop.first.wait()
        ready.cancel()
        failed_before = app[keys.CLIENT].num_failed
        await _drain(app, stop, launch.server.shutdown_timeout)
        heartbeats.cancel()
        has_failed = app[keys.CLIENT].num_failed > failed_before
        return ExitStatus.FAILURE if has_failed else ExitStatus.DONE
    finally:
        await runner.cleanup()


async def _report_ready(app: web.Application, launch: FrontendLaunch) -> None:
    # No deadline here: the supervisor bounds the whole start.
    await app[keys.CLIENT].wait_ready()
    _report(launch.supervisor, Ready(launch.name))


async def _send_heartbeats(launch: FrontendLaunch) -> None:
    """A sign of life from the event loop, for the supervisor."""
    interval = heartbeat_interval(launch.config.reliability.hang_timeout)
    with zmq.Context() as context:
        heartbeats = HeartbeatSender(context, zmq.PUSH, launch.supervisor, Heartbeat(launch.name), interval)
        try:
            while True:
                heartbeats.send_if_due()
                await asyncio.sleep(interval)
        finally:
            heartbeats.close()


async def _drain(app: web.Application, stop: "_StopSignal", timeout_s: float) -> None:
    draining = asyncio.create_task(app[keys.LIFECYCLE].drain(timeout_s))
    second_signal = asyncio.create_task(stop.second.wait())
    await asyncio.wait({draining, second_signal}, return_when=asyncio.FIRST_COMPLETED)
    second_signal.cancel()
    draining.cancel()
    unfinished = app[keys.LIFECYCLE].running
    if unfinished:
        get_logger().warning("stopping with %d requests unfinished", unfinished)
        await app[keys.LIFECYCLE].interrupt(_LAST_RESPONSES_S)


class _StopSignal:
    """SIGTERM: the first starts draining, the second ends it."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._count)

    def _count(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


def _report(supervisor: str, message: ToSupervisor) -> None:
    context = zmq.Context()
    with context.socket(zmq.PUSH) as status:
        status.setsockopt(zmq.LINGER, _STATUS_LINGER_MS)
        status.connect(supervisor)
        status.send(encode(message), zmq.DONTWAIT)
    context.term()


if __name__ == "__main__":
    main()
