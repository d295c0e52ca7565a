"""Which frontend may try requests that may have ended engines: one at a time, in the order of asking."""

from atom.shared.messages.supervisor import Trial, WantTrial

__all__ = ["Trials"]


class Trials:
    """The turns of all frontends."""

    def __init__(self) -> None:
        self.current = Trial()
        self._waiting: dict[int, int] = {}  # numbers by frontend, the one that has waited longest first

    def want(self, message: WantTrial) -> bool:
        """A frontend wants a turn, or none any more. Returns whether `current` has changed."""
        before = self.current
        self._waiting.pop(message.frontend, None)
        if self.current.frontend == message.frontend:
            self.current = Trial()
        if message.number:
            self._waiting[message.frontend] = message.number
        if self.current == Trial() and self._waiting:
            frontend = next(iter(self._waiting))
            self.current = Trial(frontend, self._waiting.pop(frontend))
        return self.current != before
