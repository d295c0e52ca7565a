"""Tool calls between marker tokens, in a section of their own: DeepSeek and Kimi.

<section> <call> header <separator> arguments <end of call> <call> … <end of section>
"""

from typing import ClassVar

from frontend.text.reply_formats.json_calls import JsonSpan
from frontend.text.reply_formats.text import MAX_HEADER, Markers, TextParser

__all__ = ["SectionCalls"]


class SectionCalls(TextParser):
    """States of a section. The markers of a call stand in the text only as tokens."""

    SECTION_END: ClassVar[str]
    CALL: ClassVar[str]
    SEPARATOR: ClassVar[str]
    CALL_END: ClassVar[str]
    BETWEEN: ClassVar[Markers]
    """What follows a call: the next one, or the end of the section."""
    HEADER_ENDS: ClassVar[Markers]
    ARGUMENT_ENDS: ClassVar[Markers]

    _head = ""
    _span = JsonSpan()
    _raw = ""
    """What was consumed of a call whose name is not known."""

    def _opened(self, marker: str) -> None:
        self._head = ""
        self._raw = marker
        self._state = self._header if marker == self.CALL else self._section

    def _section(self) -> bool:
        text, marker = self._take(self.BETWEEN)
        self._write(text)
        if marker is None:
            return False
        if marker == self.CALL:
            self._open(marker)
        else:
            self._state = self._content
        return True

    def _header(self) -> bool:
        """Before the arguments."""
        text, marker = self._take(self.HEADER_ENDS)
        self._head += text
        if marker is None:
            if self._ended or len(self._head) > MAX_HEADER:
                self._reject(self._raw + self._head)
            return False
        if marker == self.SEPARATOR and self._begin(self._head):
            return True
        if marker in self.OPENERS:
            self._buffer = marker + self._buffer
            marker = ""
        self._reject(self._raw + self._head + marker)
        return True

    def _begin(self, head: str) -> bool:
        """Start the call of this header and set the next state; false if it is malformed."""
        raise NotImplementedError

    def _before_arguments(self) -> bool:
        """White space is no part of the arguments."""
        self._buffer = self._buffer.lstrip()
        if not self._buffer and not self._ended:
            return False
        self._span = JsonSpan()
        self._state = self._arguments
        return True

    def _arguments(self) -> bool:
        text, marker = self._take(self.ARGUMENT_ENDS)
        self._argue(text)
        self._span.feed(text)
        if marker is not None and self._options.enforced and self._span.in_string:
            self._argue(marker)
            return True
        if marker is None:
            if self._ended and self._complete:
                self._end()
            return False
        self._end()
        if marker == self.CALL:
            self._open(marker)
        else:
            self._state = self._content if marker == self.SECTION_END else self._section
        return True
