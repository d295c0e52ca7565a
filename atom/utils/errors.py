"""Exceptions as text, for a log line or a message to another process."""

_MAX_LENGTH = 2000


def one_line(error: BaseException, *plain: type[BaseException]) -> str:
    """The name of the error's type and its message, on one line of bounded length.

    Without the name for instances of `plain`, whose messages are written for a user; the name
    alone for an error without a message.
    """
    name = type(error).__name__
    text = " ".join(str(error).split())
    if len(text) > _MAX_LENGTH:
        text = text[:_MAX_LENGTH] + " ..."
    if not text:
        return name
    return text if isinstance(error, plain) else f"{name}: {text}"
