"""The limit of open files; every client connection uses one."""

import resource

_ENOUGH = 65536
NEEDED_FILES = 256


class OpenFilesError(OSError):
    """The limit of open files is too low; the text is one line with the remedy."""


def raise_open_files_limit() -> None:
    """Raise the soft limit as far as is useful and allowed, for this process and its children.

    Raises OpenFilesError when the hard limit is too low for a server.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < NEEDED_FILES:
        raise OpenFilesError(
            f"only {allowed} files may be open, and a server needs {NEEDED_FILES}: raise the hard limit "
            "(ulimit -Hn, or LimitNOFILE= of a systemd unit)"
        )
