"""What `--kv-transfer-config` says: which server computes prompts, and which goes on with them. vLLM's keys.

The connector names the tier of KV blocks that stands in for it; the tier has flags of its own.
`NixlConnector` has none: the engines that generate read blocks from the memory of those that computed a
prompt, in the same server (`--prefill-engines`) or in another one (`atom.shared.config.kv_peers`).
"""

from importlib.util import find_spec
from typing import Any, Literal

from atom.shared.config.cache import CacheConfig
from atom.shared.config.fields import ConfigError, json_object

__all__ = ["KVRole", "kv_role", "nixl_problem", "reads_peers"]

KVRole = Literal["kv_both", "kv_producer", "kv_consumer"]
_ROLES: tuple[KVRole, ...] = ("kv_both", "kv_producer", "kv_consumer")
_FLAG = "--kv-transfer-config"
_MEMORY = "--kv-offload-memory"
_FILES = "--kv-offload-dir"
_STORE = "--kv-offload-remote-url"
_NIXL = "NixlConnector"
_TIERS = {
    "OffloadingConnector": _MEMORY,
    "SharedStorageConnector": _FILES,
    "ExampleConnector": _FILES,
    "LMCacheConnectorV1": _STORE,
    "MooncakeStoreConnector": _STORE,
}
"""By the connectors of vLLM that keep blocks somewhere. Others send them from engine to engine."""
_ACCEPTED = {"kv_load_failure_policy": "recompute", "kv_connector_extra_config": {}}
"""Keys whose other values are refused; all may be null."""


def kv_role(cache: CacheConfig) -> KVRole:
    """Whether a server stores blocks for others, loads theirs, or does both, as without the flag.

    Raises ConfigError for what cannot be done.
    """
    if cache.kv_transfer_config is None:
        return "kv_both"
    given = json_object(cache.kv_transfer_config)
    connector = given.pop("kv_connector", None)
    tier = "" if connector == _NIXL else _tier(connector)
    role = _role(given.pop("kv_role", None))
    for name, value in given.items():
        _check(name, value, tier)
    if not tier:
        return role
    flags = {
        _MEMORY: cache.kv_offload_memory,
        _FILES: cache.kv_offload_dir,
        _STORE: cache.kv_offload_remote_url,
    }
    if flags[tier] is None:
        raise ConfigError(f"{_FLAG}: the tier in place of this connector has flags of its own: give {tier}")
    if role == "kv_both":
        return role
    if tier == _MEMORY or (tier == _FILES and not (cache.kv_offload_shared or flags[_STORE])):
        raise ConfigError(
            f"{_FLAG}: {role} needs a tier that servers share: use {_STORE}, or {_FILES} with "
            "--kv-offload-shared"
        )
    return role


def reads_peers(cache: CacheConfig) -> bool:
    """Whether engines read blocks from the memory of others, by the library NIXL."""
    given = {} if cache.kv_transfer_config is None else json_object(cache.kv_transfer_config)
    return given.get("kv_connector") == _NIXL


def nixl_problem() -> str:
    """Why blocks cannot be read from other engines; empty if they can."""
    return "" if find_spec("nixl") else "nixl is not installed: pip install 'atom-serve[nixl]'"


def _role(given: Any) -> KVRole:
    for role in _ROLES:
        if given == role:
            return role
    raise ConfigError(f"{_FLAG}: kv_role is {given!r:.80}: use {', '.join(_ROLES)}")


def _tier(connector: Any) -> str:
    """The flag of the tier that stands in for a connector."""
    if not isinstance(connector, str) or connector not in _TIERS:
        raise ConfigError(
            f"{_FLAG}: kv_connector {connector!r:.80} is not supported: use {', '.join(_TIERS)} for "
            f"blocks that go through tiers, or {_NIXL} for those that go from memory to memory"
        )
    return _TIERS[connector]


def _check(name: str, value: Any, tier: str) -> None:
    if value is None or (name in _ACCEPTED and value == _ACCEPTED[name]):
        return
    if name == "kv_connector_extra_config":
        instead = f"omit it, and use the flags of {tier}" if tier else "omit it"
        raise ConfigError(f"{_FLAG}: {name} is for vLLM's connectors: {instead}")
    if name == "kv_load_failure_policy":
        raise ConfigError(
            f'{_FLAG}: {name} is {value!r:.80}: blocks that are lost are computed; use "recompute"'
        )
    raise ConfigError(f"{_FLAG}: {name} is not supported; use kv_connector, kv_role")
