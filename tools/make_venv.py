"""Make a virtual environment, or keep one that is whole.

    python tools/make_venv.py DIRECTORY [--of-this-python]

An environment is made anew if making it, or installing into it, was interrupted; with --of-this-python also
if it is another interpreter's. Exit status 1, with one line, where this interpreter cannot make one.

Any Python from 3.6 on can read this file, so that an old one is told what is missing.
"""

import glob
import os
import subprocess
import sys
from importlib.util import find_spec

OLDEST = (3, 11)
_IDENTITY = "import os, sys; print(os.path.realpath(sys.base_prefix), *sys.version_info[:2])"


def main() -> None:
    directories = [each for each in sys.argv[1:] if each != "--of-this-python"]
    if len(directories) != 1:
        sys.exit("usage: python tools/make_venv.py DIRECTORY [--of-this-python]")
    (directory,) = directories
    found = identity(os.path.join(directory, "bin", "python"))
    is_right = bool(found) and ("--of-this-python" not in sys.argv or found == identity(sys.executable))
    if is_right and is_whole(directory):
        return
    problem = why_not(directory)
    if problem:
        sys.exit("error: " + problem)
    print(f"making {directory}, by {sys.executable}", flush=True)
    making = [sys.executable, "-m", "venv", "--clear", directory]
    try:
        failed = subprocess.call(making)
    except KeyboardInterrupt:
        sys.exit(f"interrupted: the next call makes {directory} anew")
    if failed:
        sys.exit("error: this failed: " + " ".join(making))


def identity(python: str) -> str:
    """What an interpreter, or that of an environment, is made from; empty where it does not run."""
    try:
        return subprocess.check_output([python, "-c", _IDENTITY], stderr=subprocess.DEVNULL).decode()
    except (OSError, subprocess.CalledProcessError):
        return ""


def is_whole(directory: str) -> bool:
    """Whether it has pip, and each package its list of files, which pip writes last."""
    packages = glob.glob(os.path.join(directory, "lib", "python3*", "site-packages", "*.dist-info"))
    has_pip = any(os.path.basename(package).startswith("pip-") for package in packages)
    return has_pip and all(os.path.exists(os.path.join(package, "RECORD")) for package in packages)


def why_not(directory: str) -> str:
    """Why this interpreter cannot make it there, and what to do; else empty."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < OLDEST:
        return (
            f"ATOM needs Python 3.11 or newer, and {sys.executable} is {version}: "
            "install a newer one and name it, as in: make install PYTHON=python3.12"
        )
    if find_spec("ensurepip") is None:
        short = ".".join(map(str, sys.version_info[:2]))
        return (
            f"{sys.executable} lacks the module ensurepip, which virtual environments need: "
            f"install it (Debian, Ubuntu: apt install python{short}-venv)"
        )
    is_other = os.path.isdir(directory) and os.listdir(directory)
    if is_other and not os.path.exists(os.path.join(directory, "pyvenv.cfg")):
        return f"{directory} is no virtual environment: move it away"
    return ""


if __name__ == "__main__":
    main()
