"""`atom-launch`: serves one model over HTTP.

Exit status: 0 after SIGTERM or SIGINT, 1 when the engine died, 2 for a bad command line or
configuration, 3 for a model that cannot be served, 4 for what the host lacks; see
`atom.utils.exit_status`.
"""

import signal
import sys

from atom.utils.install_check import check_install


def main() -> None:
    """Entry point of `atom-launch` and of `python -m atom.entrypoints.openai_server`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while modules load is no traceback
    check_install()
    # Only now: a foreign package of the same name could break any import of ours.
    from atom.launcher import run

    sys.exit(run())


if __name__ == "__main__":
    main()
