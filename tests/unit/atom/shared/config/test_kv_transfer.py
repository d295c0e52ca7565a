"""vLLM's JSON for roles: what the tiers can do is accepted, all else is refused by name."""

import json
from typing import Any

import pytest

from atom.shared.config import kv_transfer
from atom.shared.config.cli import engine_config_from_kwargs
from atom.shared.config.fields import ConfigError
from atom.shared.config.kv_tiers import check_kv_tiers
from atom.shared.config.kv_transfer import kv_role, reads_peers

STORE = {"kv_offload_remote_url": "redis://store", "kv_offload_remote": "8G"}
FILES = {"kv_offload_dir": "kv", "kv_offload_disk": "8G"}
TWO = {"data_parallel_size": 2, "prefill_engines": 1}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
LMCACHE = {"kv_connector": "LMCacheConnectorV1"}


def role(transfer: dict[str, Any], **options: Any) -> str:
    made = engine_config_from_kwargs(model="m", kv_transfer_config=json.dumps(transfer), **options)
    check_kv_tiers(made.cache, made.parallel)
    return kv_role(made.cache)


def test_roles_with_the_tier_that_stands_in_for_a_connector() -> None:
    assert role(LMCACHE | {"kv_role": "kv_producer"}, **STORE) == "kv_producer"
    nulls = {"kv_rank": None, "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {}}
    assert role(LMCACHE | {"kv_role": "kv_consumer"} | nulls, **STORE) == "kv_consumer"
    offloading = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    assert role(offloading, kv_offload_memory="1G") == "kv_both"
    files = {"kv_connector": "ExampleConnector", "kv_role": "kv_producer"}
    assert role(files, kv_offload_shared=True, **FILES) == "kv_producer"
    assert kv_role(engine_config_from_kwargs(model="m").cache) == "kv_both"


def test_nixl_is_for_the_engines_of_one_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_transfer, "find_spec", lambda name: object())
    assert role(NIXL, **TWO) == "kv_both"
    made = engine_config_from_kwargs(model="m", kv_transfer_config=json.dumps(NIXL), **TWO)
    assert reads_peers(made.cache) and not made.shares_blocks
    assert not reads_peers(engine_config_from_kwargs(model="m").cache)
    monkeypatch.setattr(kv_transfer, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"NixlConnector: nixl is not installed: pip install 'atom-serve\[nixl"
    ):
        role(NIXL, **TWO)


@pytest.mark.parametrize(
    ("transfer", "options", "message"),
    [
        ({}, STORE, "kv_connector None is not supported"),
        (
            {"kv_connector": "P2pNcclConnector"},
            STORE,
            "'P2pNcclConnector' .* or NixlConnector for the engines",
        ),
        (NIXL, {}, "NixlConnector is for the engines of one server: give --prefill-engines"),
        (NIXL | {"kv_role": "kv_producer"}, {}, "the kv_role kv_both"),
        (NIXL, TWO | {"enable_prefix_caching": False}, "omit --no-enable-prefix-caching"),
        (NIXL, TWO | {"nnodes": 2}, "not supported on several nodes"),
        (NIXL | {"kv_connector_extra_config": {"backends": ["UCX"]}}, TWO, "vLLM's connectors: omit it$"),
        (LMCACHE, STORE, "kv_role is None: use kv_both, kv_producer, kv_consumer"),
        (LMCACHE | {"kv_role": "kv_both"}, FILES, "give --kv-offload-remote-url"),
        (LMCACHE | {"kv_role": "kv_both", "kv_port": 14579}, STORE, "kv_port is not supported"),
        (LMCACHE | {"kv_role": "kv_both", "kv_load_failure_policy": "fail"}, STORE, 'use "recompute"'),
        (
            LMCACHE | {"kv_role": "kv_both", "kv_connector_extra_config": {"a": 1}},
            STORE,
            "use the flags of --kv-offload-remote-url",
        ),
        (
            {"kv_connector": "OffloadingConnector", "kv_role": "kv_consumer"},
            {"kv_offload_memory": "1G"},
            "a tier that servers share",
        ),
        ({"kv_connector": "ExampleConnector", "kv_role": "kv_producer"}, FILES, "with --kv-offload-shared"),
        (
            LMCACHE | {"kv_role": "kv_producer"},
            STORE | {"data_parallel_size": 2, "prefill_engines": 1},
            "--prefill-engines has both roles",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(
    transfer: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        role(transfer, **options)
