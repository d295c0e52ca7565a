"""All scenarios of atom.benchmarks.chaos, with a small model on two engines and two frontends.

    python -m tests.evaluation.chaos --output docs/operate/reliability.json

Further flags are those of the tool.
"""

import sys
import tempfile
from pathlib import Path

from atom.benchmarks.chaos.__main__ import main
from tests.helpers.servers.random_server import ARGS, write_checkpoint

_TINY = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
_SERVER = ("-dp", "2", "--api-server-count", "2", "--host", "127.0.0.1", "--server-port", "0")
_LIMITS = ("--max-queued-requests", "512", "--hang-timeout", "30", "--orphan-grace", "60")

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        model = write_checkpoint(Path(directory) / "model", **_TINY)
        launch = ["--launch", "--model", str(model), *ARGS, *_SERVER, *_LIMITS]
        main(["--scenario", "all", "--tokens", "2000", *sys.argv[1:], *launch])
