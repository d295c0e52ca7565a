"""`atom doctor`, also as `python -m atom doctor`: what this machine has, and whether it can serve a model.

A command besides `atom-launch`: it takes no model and none of the engine's flags.
"""

import argparse
import sys

from atom.shared.utils.install_check import check_install
from atom.shared.utils.version import atom_version


def main() -> None:
    """Entry point. Exit status of doctor: 0 if a model can be served, else 1; 2 for a bad command line."""
    parser = argparse.ArgumentParser(
        prog="atom",
        description="Looks at this machine; `atom-launch MODEL` serves a model.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command")
    doctor = commands.add_parser("doctor", help="what this machine has", allow_abbrev=False)
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument("--hub", action="store_true", help="also try to reach the Hugging Face hub")
    doctor.add_argument("--server-port", type=int, default=8000, metavar="N", help="the HTTP port to try")
    if sys.argv[1:2] == ["serve"]:
        parser.error("atom-launch MODEL serves a model")
    args = parser.parse_args()
    if args.version:
        print(f"ATOM {atom_version()}")
        return
    if args.command is None:
        parser.error("give a command: atom doctor")
    if not 1 <= args.server_port <= 65535:
        doctor.error(f"--server-port {args.server_port}: it must be from 1 to 65535")
    check_install()
    # Imported after the check: a foreign package of the same name could break our imports.
    from atom.commands.doctor import run

    sys.exit(run(args.server_port, args.hub, args.json))


if __name__ == "__main__":
    main()
