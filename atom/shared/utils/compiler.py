"""The C++ compiler of this host."""

import os
import shlex
import shutil

__all__ = ["COMPILERS", "find_compiler"]

COMPILERS = ("c++", "g++", "clang++")


def find_compiler() -> list[str]:
    """The command of a C++ compiler: CXX with its arguments, or one of `COMPILERS`; empty: none is found."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    for command in [wanted] if wanted else [[name] for name in COMPILERS]:
        if path := shutil.which(command[0]):
            return [path, *command[1:]]
    return []
