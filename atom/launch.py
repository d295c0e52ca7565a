"""`atom-launch`: serves one model over HTTP.

Exit status: 0 after SIGTERM, SIGINT or SIGHUP, 1 when the engine died, 2 for a bad command line or
configuration, 3 for a model that cannot be served, 4 for missing host resources; see
`atom.shared.utils.exit_status`.
"""

import os
import signal
import sys

from atom.shared.utils.install_check import check_install


def main() -> None:
    """Entry point of `atom-launch` and of `python -m atom.entrypoints.openai_server`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for Ctrl-C during imports
    open_standard_streams()
    check_install()
    # Imported after the check: a foreign package of the same name could break our imports.
    from atom.engine.launcher import run

    sys.exit(run())


def open_standard_streams() -> None:
    """Open /dev/null as each standard stream that the caller has closed, as with `2>&-`.

    Else the next socket would get its number, and what is printed to it.
    """
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: fd
            setattr(sys, name, open(fd, "w" if fd else "r", closefd=False))


if __name__ == "__main__":
    main()
