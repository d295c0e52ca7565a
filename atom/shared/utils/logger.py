"""One log format for all processes, on standard error."""

import logging
import sys
import time

_RARE_S = 60.0
_BRIEF = "%(asctime)s %(levelname).1s %(process_label)s] %(message)s"
_VERBOSE = (
    "%(asctime)s %(levelname)s %(process_label)s pid=%(process)d "
    "%(pathname)s:%(lineno)d %(funcName)s] %(message)s"
)


def setup_logging(process_label: str, level: str = "info") -> logging.Logger:
    """Configure and return the root of ATOM's loggers, from `level` on (debug, info, warning or error).

    ATOM_LOG_MORE=1 adds process id, file and line.
    """
    from atom.shared.utils import envs

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(
            _VERBOSE if envs.ATOM_LOG_MORE else _BRIEF,
            datefmt="%H:%M:%S",
            defaults={"process_label": process_label},
        )
    )
    logger = logging.getLogger("atom")
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    return logger


def set_log_level(level: str) -> None:
    """Log from this level on: debug, info, warning or error."""
    get_logger().setLevel(level.upper())


def get_logger() -> logging.Logger:
    """The logger that `setup_logging` configured."""
    return logging.getLogger("atom")


class RareWarning:
    """Logs the first warning of a minute, and how many came after it with the next one."""

    def __init__(self) -> None:
        self._logged_at = -_RARE_S
        self._num_silent = 0

    def log(self, text: str) -> None:
        """`text` is one line."""
        if time.monotonic() - self._logged_at < _RARE_S:
            self._num_silent += 1
            return
        self._logged_at = time.monotonic()
        more = f" ({self._num_silent} more before this line)" if self._num_silent else ""
        self._num_silent = 0
        get_logger().warning("%s%s", text, more)
