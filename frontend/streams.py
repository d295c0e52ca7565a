"""What an HTTP request reads: the updates of all its sequences."""

import asyncio
from collections.abc import AsyncIterator

from frontend.errors import ApiError
from frontend.output_processor import Update

__all__ = ["Stream"]


class Stream:
    """The updates of one HTTP request, over all its sequences."""

    def __init__(self, request_ids: list[int], every_step: bool):
        self.open = set(request_ids)
        """Ids of the sequences that have not ended."""
        self.first_token_at = 0.0
        self.last_token_at = 0.0
        self._every_step = every_step
        self._pending: dict[int, Update] = {}
        self._error: ApiError | None = None
        self._wake = asyncio.Event()

    def put(self, update: Update, now: float) -> None:
        """Add an update, and wake the reader if it waits for every step or all sequences have ended."""
        if update.token_ids:
            self.first_token_at = self.first_token_at or now
            self.last_token_at = now
        earlier = self._pending.get(update.request_id)
        if earlier is None:
            self._pending[update.request_id] = update
        else:
            earlier.merge(update)
        if update.finished:
            self.open.discard(update.request_id)
        if self._every_step or not self.open or update.error:
            self._wake.set()

    @property
    def failed(self) -> bool:
        """Whether `fail` was called."""
        return self._error is not None

    def fail(self, error: ApiError) -> None:
        """End the stream; the reader gets the pending updates and then `error`."""
        self._error = error
        self._wake.set()

    def __aiter__(self) -> AsyncIterator[list[Update]]:
        return self

    async def __anext__(self) -> list[Update]:
        """At most one update for each sequence. Raises the error given to `fail`."""
        if not self.open and not self._pending:
            raise StopAsyncIteration
        await self._wake.wait()  # bounded: the client fails all streams of a hung core
        if self._error is not None and not self._pending:
            raise self._error
        updates = list(self._pending.values())
        self._pending.clear()
        if self._error is None:
            self._wake.clear()
        return updates
