"""`atom-launch`: serves one model over HTTP.

Exit status: 0 after SIGTERM or SIGINT, 1 when the engine could not start or died, 2 for a bad
command line.
"""

import sys

from atom.utils.install_check import check_install


def main() -> None:
    """Entry point of `atom-launch` and of `python -m atom.entrypoints.openai_server`."""
    check_install()
    # Only now: a foreign package of the same name could break any import of ours.
    from atom.launcher import run

    sys.exit(run())


if __name__ == "__main__":
    main()
