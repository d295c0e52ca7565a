"""Settings that an EngineClient takes from the configuration."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from atom.shared.messages.resume import HandedStream

__all__ = ["ClientHooks", "ClientSettings"]


@dataclass(frozen=True)
class ClientSettings:
    """Limits and times of the requests of one process."""

    num_ranks: int = 1
    """Engines, when all of them live."""
    max_num_seqs: int = 256
    """Sequences that one engine runs at once."""
    max_queued: int = 1024
    """Sequences that may wait, over all engines."""
    index: int = 0
    """This frontend's number, unique among the frontends of the engines."""
    num_frontends: int = 1
    """The limits of admission are divided among them."""
    hang_timeout: float = 60.0
    max_output_bytes: int = 1 << 30
    """Bytes of output that may wait to be sent, over all requests of this frontend."""
    max_replays: int = 0
    """How often a sequence runs again after the end of its engine."""
    engines_end_together: bool = False
    max_queue_s: float | None = None
    """Most seconds that a request may wait until it runs; None: no limit."""
    life: int = 0
    """How often this frontend has been started again, and those of the servers that this one replaces."""
    prefill_engines: int = 0
    """The first so many engines only compute prompts; 0: every engine does all."""
    prefill_min_tokens: int = 0
    """Shorter prompts are computed by the engines that generate."""
    block_tokens: int = 16
    """Tokens of one KV block."""
    orphan_grace: float = 0.0
    """As --orphan-grace: seconds for which a stream without a client is kept; 0: none is."""
    stream_dir: str = ""
    """Directory for the files of streams, as in StreamFiles; empty: they have none."""

    def running(self, num_engines: int) -> float:
        """Sequences of this frontend that so many engines run at once."""
        return self.max_num_seqs * max(num_engines, 1) / self.num_frontends

    def capacity(self, num_engines: int) -> int:
        """Sequences that this frontend may have in progress while so many engines are ready."""
        total = self.max_num_seqs * max(num_engines, 1) + self.max_queued
        return -(-total // self.num_frontends)


async def _no_stream(key: str, tenant: str) -> HandedStream:
    return HandedStream(0)


@dataclass(frozen=True)
class ClientHooks:
    """What an EngineClient calls."""

    on_ready: Callable[[int], None] = lambda max_model_len: None
    """With the smallest max_model_len of the engines, whenever one has become ready."""
    want_trial: Callable[[int], None] | None = None
    """For the `TrialTurn` of this frontend; None if the engines have no other one."""
    grammar_source: Callable[[bytes], bytes | None] = lambda key: None
    """The encoded source of the grammar of an unfinished request, by its key."""
    handed_stream: Callable[[str, str], Awaitable[HandedStream]] = _no_stream
    """Takes a stream of the server that this one replaces, by its key and tenant."""
