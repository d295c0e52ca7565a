"""Engines that compute prompts need a way for their blocks."""

from typing import Any

import pytest

from atom.engine.engine_host import check_same_engines
from atom.shared.config.cli import engine_config_from_kwargs
from atom.shared.config.engine import EngineConfig
from atom.shared.config.fields import ConfigError
from atom.shared.config.kv_tiers import check_kv_tiers
from atom.shared.utils import redis_client

FILES = {"kv_offload_dir": "kv", "kv_offload_disk": "8G"}
STORE = {"kv_offload_remote_url": "redis://store", "kv_offload_remote": "8G"}


def config(**options: Any) -> EngineConfig:
    made = engine_config_from_kwargs(model="m", **options)
    check_kv_tiers(made.cache, made.parallel)
    return made


def test_prefill_engines_share_a_directory_or_a_store() -> None:
    assert config(**FILES, data_parallel_size=3, prefill_engines=2).shares_blocks
    assert config(**STORE, data_parallel_size=3, prefill_engines=2).shares_blocks
    assert config(**FILES, **STORE).shares_blocks
    assert config(**FILES, kv_offload_shared=True).shares_blocks
    assert not config(**FILES).shares_blocks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_offload_shared": True}, "give --kv-offload-dir"),
        ({"kv_offload_shared": True} | FILES | STORE, "omit it"),
        ({"kv_offload_remote": "8G"}, "go together"),
        ({"kv_offload_remote_url": "redis://store"}, "go together"),
        (STORE | {"kv_offload_remote_url": "http://store"}, "--kv-offload-remote-url: .*begin with redis://"),
        (STORE | {"enable_prefix_caching": False}, "omit --no-enable-prefix-caching"),
        ({"data_parallel_size": 2, "prefill_engines": 1}, "such as /dev/shm/atom-kv"),
        ({"data_parallel_size": 2, "prefill_engines": 2} | FILES, "leaves none of --data-parallel-size 2"),
        ({"prefill_engines": 1} | FILES, "leaves none of --data-parallel-size 1"),
        (
            {"data_parallel_size": 2, "prefill_engines": 1, "enable_expert_parallel": True} | FILES,
            "step together",
        ),
    ],
)
def test_flags_that_lack_another_one_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**options)


def test_a_remote_store_needs_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_client, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'atom-serve\[redis\]'"):
        config(**STORE)


def test_the_library_without_an_event_loop_hands_nothing_over() -> None:
    check_same_engines(config(**FILES))
    with pytest.raises(ValueError, match="prefill_engines=1: atom-launch and AsyncLLMEngine"):
        check_same_engines(config(**FILES, data_parallel_size=2, prefill_engines=1))
