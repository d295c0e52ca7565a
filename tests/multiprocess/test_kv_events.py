"""The KV events of an engine core in a process of its own."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from atom.shared.messages.admin import ResetPrefixCache
from atom.shared.messages.engine import (
    FinishReason,
)
from atom.shared.messages.supervisor import Dead
from tests.helpers.engine.core_rig import CONFIG, DEADLINE_S, Engine, collect, request
from tests.helpers.servers.kv_events import BATCHES, replay

Known = dict[int, tuple[int | None, list[int]]]
"""Parent and ids of each block, by its digest."""


@pytest.mark.parametrize("event_format", ["maps", "arrays"])
def test_kv_events_tell_what_the_prefix_cache_has(tmp_path: Path, event_format: str) -> None:
    address = f"ipc://{tmp_path}/events"
    events = {"enable_kv_cache_events": True, "endpoint": address, "event_format": event_format}
    events["replay_endpoint"] = f"ipc://{tmp_path}/replay"
    cache = replace(CONFIG.cache, kv_events_config=json.dumps(events))
    engine = Engine(tmp_path, replace(CONFIG, cache=cache))
    try:
        engine.start()
        frontend = engine.frontend(0)
        frontend.receive()
        known: Known = {}
        prompts = [[1] * 4 + [number] * 40 for number in range(2, 6)]  # more than 32 blocks of 4
        for number, prompt in enumerate(prompts):
            frontend.send(request(number, prompt, 5))
            reasons: dict[int, FinishReason] = {}
            tokens: dict[int, list[int]] = {}
            engine.work_until(lambda: collect(frontend, tokens, reasons) or bool(reasons))  # noqa: B023
        computed = prompts[-1] + tokens[len(prompts) - 1][:-1]
        deadline = time.monotonic() + DEADLINE_S
        while not has_blocks(known, computed):  # a thread publishes them, maybe after the tokens have come
            assert time.monotonic() < deadline, f"blocks are missing: {known}"
            messages = replay(f"ipc://{tmp_path}/replay", 0)
            assert [number for number, _ in messages] == list(range(len(messages)))
            known.clear()
            for _, payload in messages:
                for event in msgspec.msgpack.decode(payload, type=BATCHES[event_format]).events:
                    follow(event, known)
        assert len(known) <= 32
        frontend.send(ResetPrefixCache(1))
        frontend.receive()
        while (newest := replay(f"ipc://{tmp_path}/replay", len(messages))) == []:
            assert time.monotonic() < deadline, "no event of the reset"
        (cleared,) = msgspec.msgpack.decode(newest[0][1], type=BATCHES[event_format]).events
        assert cleared.__struct_config__.tag == "AllBlocksCleared"
    finally:
        engine.close()


def has_blocks(known: Known, ids: list[int]) -> bool:
    """Whether each whole block of `ids` is known, once, with the one before as its parent."""
    digest = None
    for start in range(0, len(ids) // 4 * 4, 4):
        found = [one for one, block in known.items() if block == (digest, ids[start : start + 4])]
        if not found:
            return False
        (digest,) = found
    return True


def follow(event: Any, known: Known) -> None:
    """Apply an event to the parent and the ids of each known block."""
    if event.__struct_config__.tag == "BlockRemoved":
        for digest in event.block_hashes:
            del known[digest]
        return
    parent = event.parent_block_hash
    for index, digest in enumerate(event.block_hashes):
        assert digest not in known
        known[digest] = (parent, event.token_ids[4 * index : 4 * index + 4])
        parent = digest


def test_an_address_in_use_is_an_error_at_the_start(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        events = {"enable_kv_cache_events": True, "endpoint": f"tcp://127.0.0.1:{port}"}
        cache = replace(CONFIG.cache, kv_events_config=json.dumps(events))
        engine = Engine(tmp_path, replace(CONFIG, cache=cache))
        try:
            report = engine.report()
            assert (
                isinstance(report, Dead)
                and f"endpoint tcp://127.0.0.1:{port} cannot be bound" in report.reason
            )
            assert engine.exit_status() == 1
        finally:
            engine.close()
