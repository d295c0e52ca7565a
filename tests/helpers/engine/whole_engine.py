"""An engine core and a worker in one process, without sockets; unused KV blocks hold NaN."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch

from atom.shared.messages.engine import AddRequest, LogprobTable, Sampling, TokenDeltas, pack_ids, unpack_ids
from atom.shared.messages.images import LoadImage
from atom.shared.messages.kv_peers import LeasedBlocks
from atom.shared.messages.kv_tiers import TierSlots
from atom.shared.messages.worker import AllocateKV, BatchResult, KVSpec
from atom.shared.utils.lease_seal import new_secret
from engine_core.core import EngineCore
from engine_core.kv_cache.kv_cache_manager import KVCacheManager
from engine_core.requests.images import ImageRegistry
from engine_core.scheduler import MAX_IN_FLIGHT, Limits
from tests.helpers.checkpoints.tiny_models import MAX_MODEL_LEN
from tests.helpers.engine.core_driver import GREEDY, counts_of
from workers.layers.attention.cache_groups import StateGroup
from workers.worker import Worker

_COPY_POLL_S = 0.001


@dataclass
class Output:
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    prompt_logprobs: dict[int, float] = field(default_factory=dict)
    """Log probabilities of the prompt's own tokens, by position."""
    logprobs: dict[int, float] = field(default_factory=dict)
    """Log probabilities of the sampled tokens, by their place among them."""
    error: str = ""
    leased: LeasedBlocks | None = None
    """What the engine keeps of the prompt for another one."""


class WholeEngine:
    """`add` requests, then `run` until all have ended."""

    def __init__(
        self,
        worker: Worker,
        num_blocks: Sequence[int] | int,
        max_tokens: int = 16,
        max_rows: int = 8,
        caching: bool = True,
        tiers: Sequence[TierSlots] = (),
        specs: Sequence[KVSpec] = (),
        image_tokens: int = 0,
        lease_address: str = "",
    ):
        """`num_blocks` in each KV group; `max_tokens` are computed in one step.

        `specs`: of a worker that has loaded its model already.
        A tier in files is shared with other engines. With a `lease_address` others read its cache.
        Features of `image_tokens` tokens are held at a time.
        """
        specs = list(specs) or worker.load().kv_specs
        if isinstance(num_blocks, int):
            num_blocks = [num_blocks] * len(specs)
        secret = new_secret()
        worker.allocate(
            AllocateKV(
                list(num_blocks),
                MAX_MODEL_LEN,
                list(tiers),
                lease_address=lease_address,
                lease_secret=secret,
            )
        )
        speculative = worker._config.speculative
        limits = Limits(
            max_rows,
            max_tokens,
            num_drafts=speculative.num_speculative_tokens,
            lookahead=speculative.lookahead,
            sends_next_ids=speculative.reads_next_ids,
        )
        self.kv = KVCacheManager(specs, num_blocks, limits.max_chunk, seed=7, enable_prefix_caching=caching)
        if tiers:
            self.kv.offload_to(tiers, is_shared=any(tier.by_content for tier in tiers))
        if lease_address:
            self.kv.lease_to(lease_address, 1, secret)
        settings = worker._checkpoint.images
        images = ImageRegistry()
        if settings is not None:
            images = ImageRegistry(image_tokens, settings.token_bytes, settings.sees_ahead)
        self.core = EngineCore(limits, self.kv, MAX_MODEL_LEN, images=images)
        self.outputs: dict[int, Output] = {}
        self.most_used = [0] * len(specs)
        """Most blocks in use at once, for each group."""
        self.num_encoded = 0
        """Times that the vision tower has run."""
        self._worker = worker
        self._results: deque[BatchResult] = deque()

    def add(
        self,
        number: int,
        prompt: list[int],
        count: int,
        prompt_logprobs: int = -1,
        sampling: Sampling = GREEDY,
        n: int = 1,
        **fields: Any,
    ) -> None:
        """A request for `n` sequences of `count` tokens, numbered from `number`; `fields` of `AddRequest`."""
        numbers = list(range(number, number + n))
        message = AddRequest(
            numbers, pack_ids(prompt), count, sampling, prompt_logprobs=prompt_logprobs, **fields
        )
        assert self.core.add(message, b"a") is None
        for each in numbers:
            self.outputs[each] = Output()

    def run(self, most_steps: int = 1 << 30) -> None:
        """Until no request is left, or for some steps; two in flight whenever there is work for them."""
        for _ in range(most_steps):
            if not self.core.num_live and not self._results:
                return
            while len(self._results) < MAX_IN_FLIGHT and self._send():
                pass
            if not self._results:
                time.sleep(_COPY_POLL_S)  # all requests wait for a tier
                continue
            for deltas in self.core.update_from_output(self._results.popleft()).values():
                self._add(deltas)
            for deltas in self.core.end_stored().values():
                self._add(deltas)

    def finish_copies(self) -> None:
        """Wait until no block is being copied to a tier."""
        assert self.kv.offload is not None
        while self._copy() or self.kv.offload.num_under_way:
            time.sleep(_COPY_POLL_S)

    def _copy(self) -> bool:
        """Begin the copies that the core asks for, and confirm those that are done; whether any began."""
        tiers = self._worker.tiers
        messages = self.core.tier_messages()
        for message in messages:
            assert tiers is not None
            tiers.submit(message)
        while tiers is not None and (copied := tiers.next_copied()) is not None:
            self.core.blocks_copied(copied)
        if (leases := self._worker.leases) is not None:
            self.core.end_leases(leases.next_released())
            for ended in self.core.lease_messages():
                leases.end(ended.slots)
        return bool(messages)

    def _send(self) -> bool:
        batch = self.core.schedule()
        if batch is None:
            self._copy()
            return False
        self.core.check_integrity()
        for message in self.core.image_messages():
            if isinstance(message, LoadImage):
                self._worker.load_image(message)
                self.num_encoded += 1
            else:
                self._worker.drop_image(message.key)
        for ended in self.core.lease_messages():
            assert self._worker.leases is not None
            self._worker.leases.end(ended.slots)
        self._poison({(copy.group, copy.source) for copy in batch.state_saves})
        self._results.append(self._worker.execute(batch).result())
        self._copy()
        return True

    def _poison(self, kept: set[tuple[int, int]]) -> None:
        """Fill blocks that are neither used nor cached with NaN, so that reading one changes the output.

        `kept`: groups and slots of states that the next batch saves.
        """
        for number, (group, pool) in enumerate(
            zip(self._worker._model.kv_groups, self.kv.pools, strict=True)
        ):
            self.most_used[number] = max(self.most_used[number], pool.num_blocks - pool.num_free)
            unused = [
                block
                for block in range(pool.num_blocks)
                if not pool._ref_counts[block] and not pool._digests[block] and (number, block) not in kept
            ]
            if isinstance(group, StateGroup):  # the states after drafts
                unused = [slot * group.places + place for slot in unused for place in range(group.places)]
            for layer in group.layers:
                for tensor in _tensors(self._worker._runner._kv_layers[layer]):
                    tensor[unused] = torch.nan

    def _add(self, deltas: TokenDeltas) -> None:
        counts, ids = counts_of(deltas), list(unpack_ids(deltas.token_ids))
        owners = [
            number for number, count in zip(deltas.request_ids, counts, strict=True) for _ in range(count)
        ]
        places = []
        for number, token_id in zip(owners, ids, strict=True):
            places.append(len(self.outputs[number].token_ids))
            self.outputs[number].token_ids.append(token_id)
        if deltas.logprobs is not None:
            values = _own_values(deltas.logprobs.table)
            for index, value in zip(deltas.logprobs.indices, values, strict=True):
                self.outputs[owners[index]].logprobs[places[index]] = value
        for first in deltas.first:
            self.outputs[first.request_id].cached_tokens = first.cached_tokens
        for finished in deltas.finished:
            self.outputs[finished.request_id].error = finished.message
            self.outputs[finished.request_id].leased = finished.leased
        for chunk in deltas.prompt_logprobs:
            values = _own_values(chunk.table)
            self.outputs[chunk.owner].prompt_logprobs.update(enumerate(values, start=chunk.start))


def _tensors(cache: Any) -> Iterator[torch.Tensor]:
    if isinstance(cache, torch.Tensor):
        yield cache
    elif is_dataclass(cache):
        for part in fields(cache):
            yield from _tensors(getattr(cache, part.name))


def _own_values(table: LogprobTable) -> list[float]:
    """Log probabilities of the tokens themselves."""
    values = torch.frombuffer(bytearray(table.values), dtype=torch.float32)
    found: list[float] = values.view(-1, table.width)[:, 0].tolist()
    return found
