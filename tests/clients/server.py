"""The real frontend in front of a scripted model that calls tools, until standard input ends.

The first line of the output is the base URL. `python -m tests.clients.server`
"""

import sys
import tempfile
from pathlib import Path

from tests.helpers.servers.tool_model import running_model, running_server


def main() -> None:
    """Serve."""
    with (
        tempfile.TemporaryDirectory(prefix="t-") as directory,
        running_model(Path(directory)) as model,
        running_server(model) as client,
    ):
        print(client.base_url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
