"""Exit status of `atom-launch` and of its child processes."""

from enum import IntEnum


class ExitStatus(IntEnum):
    """A restart without a change may help after FAILURE, and perhaps after RESOURCES."""

    DONE = 0
    """Ended by SIGTERM, SIGINT or SIGHUP."""
    FAILURE = 1
    """The engine died, or could not start for another reason than those below."""
    USAGE = 2
    """The command line, an environment variable or the configuration file is invalid."""
    MODEL = 3
    """The model cannot be served: no such checkpoint, a broken file, an unknown architecture."""
    RESOURCES = 4
    """The host lacks a resource: the port, memory, disk space, file descriptors, a library that fits."""
