"""One run of SGLang's HTTP server, as tests.sglang.generate runs its Engine.

python -m tests.sglang.serve RUN.json
"""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

START_S = 900
REQUEST_S = 120


def main() -> None:
    run = json.loads(Path(sys.argv[1]).read_text())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [
            *(sys.executable, *run["server"], "--host", "127.0.0.1", "--port", str(port)),
            *flags(run["engine"]),
        ]
    )
    try:
        address = f"http://127.0.0.1:{port}"
        wait_until_ready(server, f"{address}/model_info")
        Path(run["results"]).write_text(json.dumps(generate(run, address)))
    finally:
        server.kill()
        server.wait()


def flags(engine: dict[str, Any]) -> list[str]:
    """The Engine's arguments as the server's flags."""
    found = []
    for name, value in engine.items():
        found += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return found


def wait_until_ready(server: subprocess.Popen[bytes], address: str) -> None:
    """Raises TimeoutError, or RuntimeError if the server ends."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if server.poll() is not None:
            raise RuntimeError(f"SGLang's server ended with {server.returncode}")
        try:
            urllib.request.urlopen(address, timeout=REQUEST_S).read()
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
    raise TimeoutError(f"{address} gives no reply after {START_S} s")


def generate(run: dict[str, Any], address: str) -> dict[str, Any]:
    sampling = {"max_new_tokens": run["max_tokens"], "temperature": 0, "ignore_eos": True}
    body = json.dumps({"input_ids": run["prompts"], "sampling_params": sampling}).encode()
    rounds = []
    for _ in range(run["rounds"]):
        request = urllib.request.Request(
            f"{address}/generate", body, {"Content-Type": "application/json"}, method="POST"
        )
        rounds.append(json.loads(urllib.request.urlopen(request, timeout=REQUEST_S).read()))
    return {
        "ids": [[output["output_ids"] for output in outputs] for outputs in rounds],
        "cached": [output["meta_info"]["cached_tokens"] for output in rounds[-1]],
    }


if __name__ == "__main__":
    main()
