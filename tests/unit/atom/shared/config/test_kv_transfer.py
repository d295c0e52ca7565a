"""vLLM's JSON for roles: what the tiers can do is accepted, all else is refused by name."""

import json
from typing import Any

import pytest

from atom.engine.engine_host import check_no_other_servers
from atom.shared.config import kv_transfer
from atom.shared.config.cli import engine_config_from_kwargs
from atom.shared.config.fields import ConfigError
from atom.shared.config.kv_peers import PromptTransfer, prompt_transfer
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


def transfer(role: str, **options: Any) -> PromptTransfer:
    config = json.dumps(NIXL | {"kv_role": role})
    made = engine_config_from_kwargs(model="m", kv_transfer_config=config, **options)
    return prompt_transfer(made.cache, made.parallel)


def test_what_servers_do_for_one_another() -> None:
    both = transfer("kv_both")
    assert (both.gives, both.takes, both.host, both.port) == (True, True, "127.0.0.1", 5600)
    producer, consumer = transfer("kv_producer"), transfer("kv_consumer")
    assert (producer.gives, producer.takes) == (True, False)
    assert (consumer.gives, consumer.takes) == (False, True)
    inside = transfer("kv_both", **TWO)
    assert not (inside.gives or inside.takes) and inside.is_local
    plain = engine_config_from_kwargs(model="m")
    assert prompt_transfer(plain.cache, plain.parallel) == PromptTransfer()


def test_libraries_hand_nothing_over_to_other_servers() -> None:
    for role, options in (("kv_both", TWO), ("", {})):
        config = json.dumps(NIXL | {"kv_role": role}) if role else None
        check_no_other_servers(engine_config_from_kwargs(model="m", kv_transfer_config=config, **options))
    for role in ("kv_both", "kv_producer", "kv_consumer"):
        made = engine_config_from_kwargs(model="m", kv_transfer_config=json.dumps(NIXL | {"kv_role": role}))
        with pytest.raises(ValueError, match="NixlConnector hands prompts over between servers.*atom-launch"):
            check_no_other_servers(made)


def test_only_the_given_servers_are_read() -> None:
    some = transfer("kv_consumer", kv_transfer_peers="10.0.0.0/16, 192.0.2.7:7000")
    for host, port in (("10.0.255.1", 5600), ("10.0.0.1", 6623), ("192.0.2.7", 7000)):
        assert some.may_read(host, port)
    for host, port in (
        *(("10.0.255.1", 5599), ("10.0.0.1", 6624), ("10.1.0.1", 5600), ("192.0.2.7", 5600)),
        *(
            ("192.0.2.8", 7000),
            ("127.0.0.1", 5600),
            ("10.0.0.1:5600/x", 5600),
            ("", 5600),
            ("010.0.0.1", 5600),
        ),
    ):
        assert not some.may_read(host, port)
    assert not some.is_local
    assert transfer("kv_both").is_local and not transfer("kv_producer", kv_transfer_host="10.0.0.7").is_local
    assert transfer("kv_producer", kv_transfer_peers="10.0.0.7").is_local  # which it does not read


@pytest.mark.parametrize(
    ("transfer", "options", "message"),
    [
        ({}, STORE, "kv_connector None is not supported"),
        (
            {"kv_connector": "P2pNcclConnector"},
            STORE,
            "'P2pNcclConnector' .* or NixlConnector for those",
        ),
        (NIXL | {"kv_role": "kv_producer"}, TWO, "--prefill-engines has both roles in one server"),
        (NIXL, {"enable_expert_parallel": True, "data_parallel_size": 2}, "omit --enable-expert-parallel"),
        (
            NIXL,
            {"kv_transfer_port": 65535, "data_parallel_size": 2},
            "65535 leaves 1 ports for the 2 workers",
        ),
        (NIXL, {"kv_transfer_host": "prefill.local"}, "--kv-transfer-host: 'prefill.local' is not an IPv4"),
        (NIXL, {"kv_transfer_host": "0.0.0.0"}, "cannot connect to 0.0.0.0: give an address of this host"),
        *(
            (NIXL, {"kv_transfer_peers": peers}, f"--kv-transfer-peers: {peers.split(',')[-1]!r} is neither")
            for peers in (
                "10.0.0.7,::1",
                "prefill:5600",
                "10.0.0.7:0",
                "10.0.0.7:65536",
                "10.0.0.1/16",
                "a b",
            )
        ),
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
