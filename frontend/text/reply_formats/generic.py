"""The format for models whose templates read no tools: the system message describes Hermes' tags."""

from frontend.text.reply_formats.hermes import Hermes

__all__ = ["Generic"]


class Generic(Hermes):
    """Parses one reply."""
