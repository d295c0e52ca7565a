"""`python -m atom.integrations.dynamo`: a worker of NVIDIA Dynamo."""

import sys
from importlib.util import find_spec

from atom.shared.utils.exit_status import ExitStatus
from atom.shared.utils.install_check import check_install


def main() -> int:
    """Serve until SIGTERM; returns the exit status."""
    check_install()
    if find_spec("dynamo") is None:
        print("error: Dynamo is not installed: pip install 'atom-serve[dynamo]'", file=sys.stderr)
        return ExitStatus.USAGE
    from atom.integrations.dynamo.worker import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
