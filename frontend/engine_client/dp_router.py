"""Chooses the data-parallel rank of each request.

The router knows loads, prompts and ranks; its caller says at each choice which ranks are ready. The loads
are those of its own requests: it charges a rank when a request is sent there, and releases the charge as
sequences end.
With several frontends each one balances its own requests.

A load is counted in tokens. A sequence is charged with its share of the prompt, as far as that must be
computed, and with the output to expect of it: `max_tokens`, but at most 512, since most sequences end far
earlier.

    round_robin      the next rank
    least_requests   the fewest sequences, then the fewest tokens
    least_tokens     the fewest tokens
    prefix           the fewest tokens with those of this prompt that the rank has not computed yet

`prefix` is the default. Without shared prefixes it is `least_tokens`; with them a prompt follows its
prefix, since a hit saves more time than a shorter queue: a conversation stays on one rank. The saved
tokens are also the cap: a rank is preferred only while it is ahead of the least loaded one by no more
than what the hit saves there. So a prefix that all requests share is soon on every rank.

A request that names its session is expected to find as many tokens on the rank of the session's last request
as that one had, also where its prefix is not known. So it goes there within the same cap.

What the ranks have is remembered as hashes of the first 1, 2, 3 … blocks of each prompt, at lengths that
grow by a quarter: some 40 look-ups for a prompt of 100,000 tokens. A rank is expected to have evicted
what was sent there long ago: only the newest hashes are kept.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from xxhash import xxh3_64

from atom.shared.config.engine import EngineConfig
from atom.shared.messages.engine import ID_BYTES
from frontend.engine_client.session_table import SessionTable

__all__ = ["Charge", "DPRouter", "Policy", "RoutedPrompt", "router_for"]

Policy = Literal["round_robin", "least_requests", "least_tokens", "prefix"]

_MAX_EXPECTED_OUTPUT = 512
_MAX_HASHES = 1 << 16
# Prefixes longer than this share their fate with their first so many tokens.
_MAX_PREFIX_TOKENS = 1 << 18
_GROWTH = 4  # the next prefix length is longer by a fourth


class RoutedPrompt(NamedTuple):
    """The parts of a request that the router reads."""

    ids: bytes
    """Packed int32."""
    max_tokens: int
    num_sequences: int = 1
    salt: str = ""
    """Prompts of different salts share nothing."""
    session: int = 0
    """Hash of the session's name; 0: none."""


class Charge(NamedTuple):
    """The load of one sequence on its rank."""

    rank: int
    tokens: int
    stays: bool | None = None
    """Whether the rank is that of the session's last request; None: it had none."""


class DPRouter:
    """Ranks are numbered 0 to `num_ranks` - 1; blocks have `block_size` tokens."""

    def __init__(self, policy: Policy, num_ranks: int, block_size: int, first_rank: int = 0):
        """`first_rank` is the first one chosen; that of each frontend should be another."""
        self._policy = policy
        self._num_ranks = num_ranks
        self._requests = [0] * num_ranks
        self._tokens = [0] * num_ranks
        self._next = first_rank % num_ranks
        self._prefixes = _PrefixTable(num_ranks, block_size)
        self._sessions = SessionTable(num_ranks)

    def route(self, prompt: RoutedPrompt, ready: Sequence[int]) -> Charge:
        """Choose one of the ranks `ready` (not empty) for all sequences of a request.

        Returns the charge of each sequence, which `release` takes back at its end.
        """
        hashes: list[_Prefix] = []
        computed: dict[int, int] = {}
        if self._policy == "prefix" and self._num_ranks > 1:
            hashes = self._prefixes.hashes(prompt)
            computed = self._prefixes.find(hashes)
        length = len(prompt.ids) // ID_BYTES
        last = self._sessions.find(prompt.session) if hashes and prompt.session else None
        if last is not None:
            computed[last[0]] = max(computed.get(last[0], 0), min(last[1], length - 1))
        rank = ready[0]
        if len(ready) > 1:
            costs = self._costs(ready, computed)
            least = min(costs)
            cheapest = [rank for rank, cost in zip(ready, costs, strict=True) if cost == least]
            rank = min(cheapest, key=self._turn)
        self._next = (rank + 1) % self._num_ranks
        self._prefixes.add(hashes, rank)
        if hashes and prompt.session:
            self._sessions.put(prompt.session, rank, length)
        to_compute = length - computed.get(rank, 0)
        share = -(-to_compute // prompt.num_sequences)
        stays = None if last is None else rank == last[0]
        charge = Charge(rank, share + min(prompt.max_tokens, _MAX_EXPECTED_OUTPUT), stays)
        self._requests[rank] += prompt.num_sequences
        self._tokens[rank] += prompt.num_sequences * charge.tokens
        return charge

    def release(self, charge: Charge) -> None:
        """Release the charge of a sequence that has ended."""
        self._requests[charge.rank] -= 1
        self._tokens[charge.rank] -= charge.tokens

    def forget(self, rank: int) -> None:
        """Forget the prefixes and sessions of a rank whose engine has ended: its next life has none."""
        self._prefixes.forget(rank)
        self._sessions.forget(rank)

    def load(self, rank: int) -> tuple[int, int]:
        """(sequences, tokens) charged to a rank."""
        return self._requests[rank], self._tokens[rank]

    def _costs(
        self, ready: Sequence[int], computed: Mapping[int, int]
    ) -> Sequence[int] | Sequence[tuple[int, int]]:
        """By rank; the smallest is chosen. `computed[rank]` tokens of the prompt are there.

        Lists, since a key function would be called for each rank: a choice among 1,000 took twice as long.
        """
        tokens = self._tokens
        match self._policy:
            case "round_robin":
                return [0] * len(ready)
            case "least_requests":
                return [(self._requests[rank], tokens[rank]) for rank in ready]
            case "least_tokens" | "prefix":
                if not computed:
                    return [tokens[rank] for rank in ready]
                return [tokens[rank] - computed.get(rank, 0) for rank in ready]

    def _turn(self, rank: int) -> int:
        """Orders equal ranks: 0 for the one after the rank chosen last."""
        return (rank - self._next) % self._num_ranks


def router_for(config: EngineConfig, num_ranks: int, first_rank: int = 0) -> DPRouter:
    """The router of this configuration."""
    policy = config.parallel.dp_load_balance
    if policy == "prefix" and not config.cache.enable_prefix_caching:
        policy = "least_tokens"  # the same where no prefix is ever found
    return DPRouter(policy, num_ranks, config.block_tokens, first_rank)


class _Prefix(NamedTuple):
    """The first `tokens` tokens of a prompt."""

    tokens: int
    digest: int


class _PrefixTable:
    """Which ranks have computed which prefixes; those not routed for the longest time are evicted."""

    def __init__(self, num_ranks: int, block_size: int):
        self._ends = _prefix_lengths(block_size)
        self._ranks: OrderedDict[int, int] = (
            OrderedDict()
        )  # by digest: the bits of ranks, also of earlier lives
        self._bits = [1 << rank for rank in range(num_ranks)]  # of the current life of each rank
        self._rank_of = {bit: rank for rank, bit in enumerate(self._bits)}
        self._living = (1 << num_ranks) - 1  # all of them
        self._next_bit = 1 << num_ranks

    def hashes(self, prompt: RoutedPrompt) -> list[_Prefix]:
        """The prompt's prefixes, shortest first. The whole prompt is none: its last token is computed."""
        state = xxh3_64(prompt.salt.encode("utf-8", "surrogatepass") + b"\0" if prompt.salt else b"")
        found = []
        ids = memoryview(prompt.ids)
        length = len(prompt.ids) // ID_BYTES
        for start, end in pairwise(self._ends):
            if end >= length:
                break
            state.update(ids[start * ID_BYTES : end * ID_BYTES])
            found.append(_Prefix(end, state.intdigest()))
        return found

    def find(self, prefixes: Iterable[_Prefix]) -> dict[int, int]:
        """The longest known prefix of each rank that has one, in tokens."""
        computed: dict[int, int] = {}
        for prefix in prefixes:
            ranks = self._ranks.get(prefix.digest, 0) & self._living
            if not ranks:
                break  # a rank that has a longer prefix has this one
            while ranks:
                bit = ranks & -ranks
                computed[self._rank_of[bit]] = prefix.tokens
                ranks ^= bit
        return computed

    def add(self, prefixes: Sequence[_Prefix], rank: int) -> None:
        """The rank computes these prefixes now."""
        for prefix in reversed(prefixes):  # the longest is the oldest: it is evicted first
            self._ranks[prefix.digest] = self._ranks.get(prefix.digest, 0) | self._bits[rank]
            self._ranks.move_to_end(prefix.digest)
        while len(self._ranks) > _MAX_HASHES:
            self._ranks.popitem(last=False)

    def forget(self, rank: int) -> None:
        """Forget the prefixes of a rank: the next life of its engine has a bit of its own."""
        del self._rank_of[self._bits[rank]]
        self._living ^= self._bits[rank] | self._next_bit
        self._bits[rank] = self._next_bit
        self._rank_of[self._next_bit] = rank
        self._next_bit <<= 1


def _prefix_lengths(block_size: int) -> list[int]:
    """0 and the lengths of the prefixes to hash, in tokens: whole blocks, each longer by a fourth."""
    blocks = 0
    lengths = [0]
    while lengths[-1] < _MAX_PREFIX_TOKENS:
        blocks += max(1, blocks // _GROWTH)
        lengths.append(blocks * block_size)
    return lengths
