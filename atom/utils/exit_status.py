"""What the exit status of `atom-launch` says, and that of the processes behind it."""

from enum import IntEnum


class ExitStatus(IntEnum):
    """Restarting without a change helps after FAILURE, and perhaps after RESOURCES."""

    DONE = 0
    """Ended by SIGTERM or SIGINT."""
    FAILURE = 1
    """The engine died, or could not start for a reason that is none of the others."""
    USAGE = 2
    """The command line, a variable or the configuration file asks for what cannot be."""
    MODEL = 3
    """The model cannot be had or served: no such checkpoint, a broken file, an unknown architecture."""
    RESOURCES = 4
    """The host lacks something: the port, memory, disk space, file descriptors."""
