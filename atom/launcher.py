"""One run of the server: command line, start, banner, signals, exit status."""

import signal
import socket
import sys
import time

from atom.config.cli import (
    CommandLineParser,
    ConfigError,
    add_engine_args,
    add_server_args,
    engine_config_from,
    explicit_fields,
    server_config_from,
)
from atom.config.engine import EngineConfig
from atom.config.resolve import resolve
from atom.config.server import ServerConfig
from atom.progress import ProgressBars
from atom.supervisor import StartError, Supervisor
from atom.utils import envs
from atom.utils.logger import setup_logging
from atom.utils.net import listen_socket
from atom.utils.version import atom_version

# What the frontend may take beyond its own deadline before it is killed.
_STOP_MARGIN_S = 5.0


class Launcher:
    """One run of the server, from the command line to the exit status."""

    def __init__(self, config: EngineConfig, server: ServerConfig, explicit: set[str]):
        self.config = config
        self.server = server
        self.explicit = explicit
        self.started = time.monotonic()
        self._logger = setup_logging("launch")
        self._bars = ProgressBars()
        self._stops = 0
        self._serving = False

    def run(self) -> None:
        """Serve until a signal; raises StartError or ConfigError when that is not possible."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        listener = listen_socket(self.server.host, self.server.server_port)
        with listener, Supervisor(self._bars.update) as supervisor:
            self._start(supervisor, listener)
            self._serving = True
            self._print_banner(supervisor, port=listener.getsockname()[1])
            while not self._stops:
                supervisor.check()
            self._logger.info("stopping: running requests may finish")
            timeout = self.server.shutdown_timeout + _STOP_MARGIN_S
            supervisor.stop_frontend(timeout, hurry=lambda: self._stops > 1)

    def _start(self, supervisor: Supervisor, listener: socket.socket) -> None:
        checkpoint, capabilities = supervisor.prepare(self.config.model.model)
        resolved = resolve(self.config, checkpoint, self.explicit, capabilities)
        self.config = resolved.config
        for note in resolved.notes + envs.startup_notes(self.config.device.device):
            self._logger.info(note)
        supervisor.start_engine(self.config, checkpoint)
        supervisor.start_frontend(self.config, self.server, checkpoint, listener)
        supervisor.wait_ready({"core", "frontend"})
        self._bars.close()

    def _print_banner(self, supervisor: Supervisor, port: int) -> None:
        config, details = self.config, supervisor.details
        url = f"http://{_reachable(self.server.host)}:{port}"
        name = config.model.served_model_name or config.model.model
        rows = [
            ("model", f"{name} ({config.model.dtype})"),
            ("layout", f"{config.parallel.tensor_parallel_size} x {config.device.device}"),
            (
                "KV cache",
                f"{details.get('kv_tokens', 0):,} tokens ({_kv_dtype(config)}), "
                f"at most {details.get('max_model_len', 0):,} a request",
            ),
            (
                "batch",
                f"{config.scheduler.max_num_seqs} requests, "
                f"{config.scheduler.max_num_batched_tokens} tokens a step",
            ),
            ("ready", f"after {time.monotonic() - self.started:.1f} s at {url}"),
        ]
        lines = [
            f"ATOM {atom_version()}",
            *(f"  {label:<9} {text}" for label, text in rows),
            *_try_it(url, name),
        ]
        print("\n".join(lines), file=sys.stderr, flush=True)
        if self.server.host in ("0.0.0.0", "::"):
            self._logger.info(
                "listening on every interface without a key: use --host 127.0.0.1 to stay local"
            )

    def _on_signal(self, *_: object) -> None:
        self._stops += 1
        if not self._serving:
            raise SystemExit(0)  # nobody is served yet: leave the start wherever it is


def run() -> int:
    """Serve as the command line says; returns the exit status."""
    parser = CommandLineParser(prog="atom-launch", description="Serve a model over the OpenAI API.")
    add_engine_args(parser)
    add_server_args(parser)
    parser.add_argument("--version", action="version", version=f"ATOM {atom_version()}")
    args = parser.parse_args()
    try:
        config, server = engine_config_from(args), server_config_from(args)
        Launcher(config, server, explicit_fields(args)).run()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (StartError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _kv_dtype(config: EngineConfig) -> str:
    return config.model.dtype if config.cache.kv_cache_dtype == "auto" else config.cache.kv_cache_dtype


def _reachable(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _try_it(url: str, model: str) -> list[str]:
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return [
        "  try it:",
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
    ]
