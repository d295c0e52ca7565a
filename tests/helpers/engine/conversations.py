"""Random conversations on one engine with tiny pools and tiers, which is replaced, damaged and interrupted.

Every response has the ids of a run without any cache.
"""

import dataclasses
import random
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from atom.shared.messages.kv_tiers import DISK, HOST_MEMORY, REMOTE, TierSlots
from tests.helpers.checkpoints.tiny_models import engine_config, place, prompt_of, save_tiny, tiny
from tests.helpers.engine.whole_engine import WholeEngine
from tests.helpers.servers.fake_redis import FakeRedis
from workers.worker import Worker

__all__ = ["FAMILIES", "Conversations", "plans"]

FAMILIES = {"llama-gqa": 1, "deepseek-v3.2": 1, "gpt-oss": 2, "qwen3-next": 2}
"""Models and their KV groups: full attention, latent with an index, windows, recurrent states."""
_MOST_TOKENS = 60
_NEW = 4
_BLOCKS = 18
_STATES = 6

_turns = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), min_size=1, max_size=3)
_operations = st.one_of(
    st.tuples(st.just("turns"), _turns),
    st.tuples(st.just("turns"), _turns),
    st.tuples(st.just("fork"), st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(1, 40))),
    st.tuples(st.just("abort"), st.tuples(st.integers(0, 4), st.integers(1, 6))),
    st.tuples(st.just("kill"), st.tuples(st.integers(0, 4), st.integers(1, 6))),
    st.tuples(st.just("damage"), st.tuples(st.integers(0, 99), st.sampled_from(["cut", "flip", "remove"]))),
    st.tuples(st.just("fault"), st.sampled_from(["full", "not full", "cut off", "empty"])),
    st.tuples(st.just("reset"), st.none()),
)
plans = st.tuples(
    st.sampled_from([(0, 40, 0), (6, 0, 0), (40, 0, 0), (6, 12, 0), (40, 40, 0), (0, 0, 40), (6, 12, 12)]),
    st.lists(_operations, min_size=3, max_size=14),
)
"""(slots in host memory, on disk and in a remote store, what happens)."""


class Conversations:
    """One family: a worker with tiers, and one without any cache, which says what is right."""

    def __init__(self, name: str, directory: Path, store: FakeRedis):
        _, checkpoint = save_tiny(tiny(name), directory)
        config = engine_config()
        self._files = directory / "kv"
        self._store = store
        disk = {"kv_offload_dir": str(self._files), "kv_offload_disk": 1 << 20}
        remote = {"kv_offload_remote_url": store.url, "kv_offload_remote": 1 << 20}
        cache = dataclasses.replace(config.cache, **disk, **remote)
        self._worker = Worker(
            dataclasses.replace(config, cache=cache), checkpoint, place(), lambda *progress: None
        )
        self._specs = self._worker.load().kv_specs
        self._groups = FAMILIES[name]
        self._blocks = [_BLOCKS] + [_STATES if name == "qwen3-next" else _BLOCKS] * (self._groups - 1)
        alone = Worker(config, checkpoint, place(), lambda *progress: None)
        self._alone = WholeEngine(alone, [64] * self._groups, max_tokens=64, caching=False)
        self._known: dict[tuple[int, ...], list[int]] = {}
        self._number = 0
        self.loaded = 0
        """Blocks that tiers have given back, over all engines that have ended in time."""

    def close(self) -> None:
        self._worker.close()

    def run(self, plan: tuple[tuple[int, int, int], list[tuple[str, Any]]]) -> None:
        """Raises AssertionError for an id that is not that of a run without cache."""
        (host, disk, remote), operations = plan
        self._store.is_full = False
        self._tiers = [
            TierSlots(medium, [slots] * self._groups)
            for medium, slots in ((HOST_MEMORY, host), (DISK, disk), (REMOTE, remote))
            if slots
        ]
        self._sessions = [prompt_of(9 + 3 * number, number % 3) for number in range(5)]
        self._start()
        for name, value in operations:
            getattr(self, f"_{name}")(value)
            self._engine.core.check_integrity()
        self._engine.finish_copies()
        self._engine.core.check_integrity()
        assert self._engine.core.stats().kv_blocks_used == 0
        self.loaded += sum(tier.loaded for tier in self._engine.core.stats().kv_tiers)

    def _start(self) -> None:
        self._engine = WholeEngine(
            self._worker, self._blocks, max_tokens=24, tiers=self._tiers, specs=self._specs
        )
        assert self._engine.kv.offload is not None
        self._engine.kv.offload.adopt([self._worker.stored])

    def _add(self, session: int) -> tuple[int, list[int]]:
        self._number += 1
        prompt = self._sessions[session][:_MOST_TOKENS]
        self._engine.add(self._number, prompt, _NEW)
        return self._number, prompt

    def _turns(self, turns: list[tuple[int, int]]) -> None:
        """Some sessions get their next reply at the same time."""
        added = [(session, new, *self._add(session)) for session, new in dict(turns).items()]
        self._engine.run()
        for session, new, number, prompt in added:
            ids = self._engine.outputs.pop(number).token_ids
            assert ids == self._expected(prompt)
            self._sessions[session] = prompt + ids + prompt_of(new, number)
            if len(self._sessions[session]) > _MOST_TOKENS - _NEW:
                self._sessions[session] = prompt_of(9, session % 3)

    def _fork(self, value: tuple[int, int, int]) -> None:
        source, target, length = value
        self._sessions[target] = self._sessions[source][:length]

    def _abort(self, value: tuple[int, int]) -> None:
        session, steps = value
        number, _ = self._add(session)
        self._engine.run(steps)
        self._engine.core.abort([number])
        self._engine.run()

    def _kill(self, value: tuple[int, int]) -> None:
        """The engine ends in the middle of a request and of copies; the next one finds the files."""
        session, steps = value
        self._add(session)
        self._engine.run(steps)
        self._start()

    def _damage(self, value: tuple[int, str]) -> None:
        place, kind = value
        files = sorted(path for path in self._files.glob("*/*-*") if path.is_file())
        blocks = self._store.blocks()
        if files:
            path = files[place % len(files)]
            content = _damaged(path.read_bytes(), place, kind)
            path.write_bytes(content) if content else path.unlink()
        if blocks:
            key = sorted(blocks)[place % len(blocks)]
            self._store.data.pop(key, None)
            if content := _damaged(blocks[key], place, kind):
                self._store.data[key] = content

    def _fault(self, kind: str) -> None:
        """Something happens to the store."""
        self._store.is_full = kind == "full"
        if kind == "cut off":
            self._store.disconnect()
        if kind == "empty":
            self._store.data.clear()

    def _reset(self, _: None) -> None:
        self._engine.core.reset_prefix_cache()

    def _expected(self, prompt: list[int]) -> list[int]:
        key = tuple(prompt)
        if key not in self._known:
            self._alone.add(0, prompt, _NEW)
            self._alone.run()
            self._known[key] = self._alone.outputs.pop(0).token_ids
        return self._known[key]


def _damaged(content: bytes, place: int, kind: str) -> bytes:
    """Nothing if it is to be removed."""
    changed = bytearray(content)
    changed[random.Random(place).randrange(len(changed))] ^= 1
    ends = {"cut": len(content) // 2, "flip": len(content), "remove": 0}
    return bytes(changed[: ends[kind]])
