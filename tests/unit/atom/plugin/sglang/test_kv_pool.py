"""SGLang's pools in ATOM's layout, without SGLang."""

from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atom_ops import write_kv
from atom_ops.ops.attention.kv_cache import read_kv
from tests.helpers.plugins.sglang_host import PLUGIN, Host, install, make_pool

FP8 = torch.float8_e4m3fn


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    found = Host()
    install(monkeypatch, found)
    yield found


def kv_pool() -> Any:
    return import_module(f"{PLUGIN}.kv_pool")


def not_called(pool: Any) -> None:
    raise AssertionError("SGLang's own buffers are not made")


def test_keys_and_values_are_views_of_one_tensor(host: Host) -> None:
    pool = make_pool(size=30)
    kv_pool().create_kv(not_called, pool)
    layer = kv_pool().kv_layer(pool, 1)
    assert layer.kv.shape == (9, 4, 2, 2, 16) and layer.kv.is_contiguous() and layer.scale is None
    k, v = torch.rand(2, 3, 2, 16)
    write_kv(k, v, layer, torch.tensor([5, 9, 33]))
    assert torch.equal(pool.k_buffer[1][[5, 9, 33]], k) and torch.equal(pool.v_buffer[1][[5, 9, 33]], v)
    assert len(pool.k_buffer) == len(pool.v_buffer) == 2 and len(pool.k_buffer[0]) == 34
    assert not pool.k_buffer[0].any()


def test_other_backends_get_sglang_s_buffers(host: Host) -> None:
    host.args.attention_backend = "triton"
    made: list[Any] = []
    pool = make_pool()
    kv_pool().create_kv(made.append, pool)
    kv_pool().create_latents(made.append, pool)
    assert made == [pool, pool] and not hasattr(pool, "atom_kv")
    with pytest.raises(ValueError, match="does not read a SimpleNamespace"):
        kv_pool().kv_layer(pool, 0)
    with pytest.raises(ValueError, match="does not read a SimpleNamespace"):
        kv_pool().latent_layer(pool, 0, 8)


def test_two_pools_have_the_layers_of_one_model(host: Host) -> None:
    full, windowed = make_pool(layer_num=1), make_pool(size=10, layer_num=1)
    for pool in (full, windowed):
        kv_pool().create_kv(not_called, pool)
    both = SimpleNamespace(
        full_kv_pool=full, swa_kv_pool=windowed, layers_mapping={0: (0, True), 1: (0, False)}
    )
    assert kv_pool().kv_layer(both, 0).kv.shape[0] == 4
    assert kv_pool().kv_layer(both, 1).kv.shape[0] == 9
    assert kv_pool().windowed_slots(both) is None
    both.full_to_swa_index_mapping = torch.arange(4)
    assert kv_pool().windowed_slots(both) is both.full_to_swa_index_mapping


def test_latents_stay_where_they_are(host: Host) -> None:
    pool = make_pool(size=30)

    def create(pool: Any) -> None:
        pool.kv_buffer = [torch.rand(34, 1, 12) for _ in range(2)]

    kv_pool().create_latents(create, pool)
    layer = kv_pool().latent_layer(pool, 1, 8)
    assert (layer.rows.shape, layer.latent_width, layer.scale) == ((8, 4, 12), 8, None)
    assert layer.rows.data_ptr() == pool.kv_buffer[1].data_ptr()


@pytest.mark.parametrize("changes", [{"v_head_dim": 8}, {"kv_cache_layout": "hnd"}])
def test_a_pool_of_another_shape_is_refused(host: Host, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="use another one"):
        kv_pool().create_kv(not_called, make_pool(**changes))


def test_another_dtype_is_refused(host: Host) -> None:
    with pytest.raises(ValueError, match="--kv-cache-dtype torch.uint8"):
        kv_pool().create_kv(not_called, make_pool(dtype=torch.uint8))


def test_an_fp8_pool_keeps_a_scale_for_each_token_and_head(host: Host) -> None:
    pool = make_pool(dtype=FP8)
    kv_pool().create_kv(not_called, pool)
    assert pool.k_buffer[0].dtype == torch.uint8
    layer = kv_pool().kv_layer(pool, 0)
    assert layer.kv.dtype == FP8
    k, v = torch.rand(2, 3, 2, 16) * 300
    write_kv(k, v, layer, torch.tensor([4, 5, 6]))
    found = read_kv(layer, torch.tensor([4, 5, 6]), torch.float32)
    torch.testing.assert_close(found, torch.stack([k, v], 1), rtol=0.07, atol=0.5)
    assert pool.atom_scales[0][4:7].all() and not pool.atom_scales[1].any()
