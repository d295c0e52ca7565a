"""KV cache events: what `--kv-events-config` says. The keys are vLLM's; `bind` and `event_format` are added.

An endpoint is bound where it is a place of this machine, and connected to where it is that of a
subscriber, as vLLM does: `*`, `::`, `ipc://` and loopback addresses are bound, all others connected to.
`bind` overrides that. Rank r of several engines uses the TCP port plus r, or a path with `_dp<r>`.
"""

import re
from dataclasses import dataclass, fields
from typing import Any

from atom.shared.config.cache import CacheConfig
from atom.shared.config.fields import ConfigError, json_object

DEFAULT_ENDPOINT = "tcp://127.0.0.1:5557"
FORMATS = ("maps", "arrays")
_MAX_PORT = 65535
_LIMITS = {"buffer_steps": 1_000_000, "hwm": 1_000_000, "max_queue_size": 1_000_000}
_TCP = re.compile(r"tcp://(\*|\[[0-9a-fA-F:.]*\]|[^\s:\[\]/]+):(\d{1,5})")
_BOUND = re.compile(r"tcp://(\*|0\.0\.0\.0|127\.[\d.]+|localhost|\[::1?\]):|ipc://")
_MAX_TOPIC = 256


@dataclass(frozen=True)
class KVEventsConfig:
    """Where and how one engine publishes the events of its KV cache."""

    endpoint: str = DEFAULT_ENDPOINT
    """ZeroMQ address of the PUB socket."""
    replay_endpoint: str | None = None
    """ZeroMQ address of the ROUTER socket that sends earlier messages again; None: there is none."""
    buffer_steps: int = 10_000
    """Messages that are kept for replays."""
    hwm: int = 10_000
    """Messages that wait for one subscriber that does not read; later ones are dropped for it alone."""
    max_queue_size: int = 10_000
    """Turns of the engine whose events wait for the publisher; those of further turns are dropped."""
    topic: str = ""
    """First frame of every message."""
    event_format: str = "maps"
    """maps: events with named fields, as vLLM 0.32 publishes them; arrays: as earlier versions did."""
    bind: bool | None = None
    """Whether `endpoint` is bound; None: as the address tells. The replay endpoint is always bound."""

    @property
    def is_bound(self) -> bool:
        """Whether the PUB socket binds its endpoint, or else connects to it."""
        return bool(_BOUND.match(self.endpoint)) if self.bind is None else self.bind

    @property
    def local_endpoint(self) -> str:
        """Where a subscriber on the same machine connects to; wildcards become loopback addresses."""
        return (
            self.endpoint.replace("//*:", "//127.0.0.1:")
            .replace("//0.0.0.0:", "//127.0.0.1:")
            .replace("//[::]:", "//[::1]:")
        )

    def of_rank(self, rank: int) -> "KVEventsConfig":
        """The settings of one data-parallel rank. Raises ConfigError where its port would be too high."""
        if not rank:
            return self
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in ("endpoint", "replay_endpoint"):
            values[name] = _of_rank(name, values[name], rank)
        return KVEventsConfig(**values)


def kv_events_config(cache: CacheConfig, num_ranks: int = 1) -> KVEventsConfig | None:
    """None where no events are published. Raises ConfigError for an `--kv-events-config` that cannot act."""
    if cache.kv_events_config is None:
        return None
    given = json_object(cache.kv_events_config)
    enabled = given.pop("enable_kv_cache_events", False)
    publisher = given.pop("publisher", None)
    if type(enabled) is not bool:
        raise ConfigError(f"--kv-events-config: enable_kv_cache_events is {enabled!r}: use true or false")
    if publisher not in (None, "null", "zmq"):
        raise ConfigError(f'--kv-events-config: publisher {publisher!r} is not supported; use "zmq"')
    config = _checked(given)
    if not enabled or publisher == "null":
        return None
    if not cache.enable_prefix_caching:
        raise ConfigError("--kv-events-config: no block is cached without prefix caching; omit the flag")
    config.of_rank(num_ranks - 1)
    return config


def _checked(given: dict[str, Any]) -> KVEventsConfig:
    names = [each.name for each in fields(KVEventsConfig)]
    for name, value in given.items():
        if name not in names:
            known = ", ".join(["enable_kv_cache_events", "publisher", *names])
            raise ConfigError(f"--kv-events-config: {name} is not supported; use {known}")
        _check(name, value)
    config = KVEventsConfig(**given)
    if config.replay_endpoint is not None and config.replay_endpoint == config.endpoint:
        raise ConfigError("--kv-events-config: endpoint and replay_endpoint are the same address")
    return config


def _check(name: str, value: Any) -> None:
    if name in _LIMITS:
        good = type(value) is int and 1 <= value <= _LIMITS[name]
        wanted = f"a whole number from 1 to {_LIMITS[name]}"
    elif name == "bind":
        good = value is None or type(value) is bool
        wanted = "true, false or null"
    elif name == "event_format":
        good = value in FORMATS
        wanted = " or ".join(FORMATS)
    elif name == "topic":
        good = isinstance(value, str) and value.isprintable() and len(value.encode()) <= _MAX_TOPIC
        wanted = f"a printable text of at most {_MAX_TOPIC} bytes"
    else:
        good = (value is None and name == "replay_endpoint") or _is_address(value)
        wanted = "tcp://ADDRESS:PORT (tcp://*:5557 for all interfaces) or ipc:///path"
    if not good:
        raise ConfigError(f"--kv-events-config: {name} is {value!r:.80}: it must be {wanted}")


def _is_address(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    if value.startswith("ipc://"):
        return len(value) > len("ipc://")
    found = _TCP.fullmatch(value)
    return found is not None and 1 <= int(found[2]) <= _MAX_PORT


def _of_rank(name: str, address: str | None, rank: int) -> str | None:
    if address is None:
        return None
    if address.startswith("ipc://"):
        return f"{address}_dp{rank}"
    host, _, port = address.rpartition(":")
    if int(port) + rank > _MAX_PORT:
        raise ConfigError(
            f"--kv-events-config: {name} {address}: rank {rank} would need port {int(port) + rank}"
        )
    return f"{host}:{int(port) + rank}"
