"""The real frontend on a free loopback port, in a thread, started as its own main does."""

import asyncio
import contextlib
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from atom.shared.config.cache import CacheConfig
from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.engine import EngineConfig
from atom.shared.config.model import ModelConfig
from atom.shared.config.observability import ObservabilityConfig
from atom.shared.config.parallel import ParallelConfig
from atom.shared.config.reliability import ReliabilityConfig
from atom.shared.config.scheduler import SchedulerConfig
from atom.shared.config.server import ServerConfig
from atom.shared.config.speculative import SpeculativeConfig
from atom.shared.messages.launch import FrontendLaunch
from frontend.app import create_app, start
from frontend.http.limits import HttpLimits
from tests.helpers.servers.fake_core import FakeCore

MODEL = "org/tiny"
DEADLINE_S = 60.0
CONFIG = EngineConfig(
    model=ModelConfig(model=MODEL),
    scheduler=SchedulerConfig(scheduling_policy="priority", max_num_seqs=1),
    speculative=SpeculativeConfig("ngram", 3, 5, 5),
)


class Client:
    """Plain HTTP, one connection a call."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None):
        self.port = port
        self.tls = tls
        self.base_url = f"http://127.0.0.1:{port}/v1"

    def call(self, method: str, path: str, body: Any = None, raw: bytes | None = None) -> tuple[int, Any]:
        """(status, decoded JSON)."""
        status, data, _ = self.exchange(method, path, body, raw)
        return status, json.loads(data)

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        return self.call("POST", path, body)

    def exchange(
        self,
        method: str,
        path: str,
        body: Any = None,
        raw: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, bytes, dict[str, str]]:
        """(status, body, headers with lower-case names)."""
        with contextlib.closing(self.connection()) as connection:
            data = raw if raw is not None else None if body is None else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            response = connection.getresponse()
            received = {name.lower(): value for name, value in response.getheaders()}
            return response.status, response.read(), received

    def connection(self) -> http.client.HTTPConnection:
        """A new connection."""
        if self.tls is None:
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=DEADLINE_S, context=self.tls)

    def events(self, path: str, **body: Any) -> list[Any]:
        """The decoded events of a stream; the last one must be [DONE], and is left out."""
        status, data, _ = self.exchange("POST", path, body | {"stream": True})
        assert status == 200, data
        frames = data.decode().split("\n\n")
        assert frames[-2:] == ["data: [DONE]", ""]
        return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


@contextlib.contextmanager
def running_frontend(
    core: FakeCore | Sequence[FakeCore],
    checkpoint: Checkpoint,
    server: ServerConfig | None = None,
    wait: bool = True,
    limits: HttpLimits | None = None,
    send_buffer: int | None = None,
    observability: ObservabilityConfig | None = None,
    tls: ssl.SSLContext | None = None,
    model: ModelConfig | None = None,
    max_replays: int = 3,
    port: int = 0,
    cache: CacheConfig | None = None,
    **fields: Any,
) -> Iterator[Client]:
    """The app in front of the engines `core`; ready to serve unless `wait` is false.

    An engine runs one sequence at a time, so one alone has the capacity `max_queued_requests` + 1.
    `send_buffer` is how many bytes the kernel keeps for a client that does not read; `tls` is that of
    the client; `fields` are further ones of FrontendLaunch.
    """
    cores = [core] if isinstance(core, FakeCore) else core
    listener = socket.create_server(("127.0.0.1", port))
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    port = listener.getsockname()[1]
    launch = FrontendLaunch(
        replace(
            CONFIG,
            model=model or CONFIG.model,
            cache=cache or CONFIG.cache,
            observability=observability or CONFIG.observability,
            parallel=ParallelConfig(data_parallel_size=len(cores)),
            reliability=ReliabilityConfig(max_replays=max_replays),
        ),
        server or ServerConfig(),
        checkpoint,
        [each.address for each in cores],
        "ipc:///dev/null",
        listener.fileno(),
        **fields,
    )
    stop, started = threading.Event(), threading.Event()
    thread = threading.Thread(target=_serve, args=(launch, limits, listener, started, stop))
    thread.start()
    try:
        assert started.wait(DEADLINE_S)
        client = Client(port, tls)
        if wait:
            cores[0].wait_for(lambda: client.exchange("GET", "/ready")[0] == 200)
        yield client
    finally:
        stop.set()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def launch_frame(
    core: FakeCore, checkpoint: Checkpoint, supervisor: Path, fd: int, shutdown_timeout: float = DEADLINE_S
) -> FrontendLaunch:
    """The launch message of a frontend process."""
    return FrontendLaunch(
        CONFIG,
        ServerConfig(shutdown_timeout=shutdown_timeout),
        checkpoint,
        [core.address],
        f"ipc://{supervisor}",
        fd,
    )


def _serve(
    launch: FrontendLaunch,
    limits: HttpLimits | None,
    listener: socket.socket,
    started: threading.Event,
    stop: threading.Event,
) -> None:
    async def run() -> None:
        runner = await start(create_app(launch, limits), listener)
        started.set()
        while not stop.is_set():
            await asyncio.sleep(0.005)
        await runner.cleanup()

    uvloop.run(run())
