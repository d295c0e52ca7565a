"""SGLang's attention backend `atom` on layers of SGLang's own models, without SGLang."""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.helpers.plugins.sglang_host import PLUGIN, AttentionType, Host, Mode, batch_of, install, make_pool

SLOTS = torch.tensor([[4, 5, 6, 7, 20, 21, 22, 23]], dtype=torch.int32)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    install(monkeypatch, Host())
    pool = make_pool()
    import_module(f"{PLUGIN}.kv_pool").create_kv(lambda pool: None, pool)
    runner = SimpleNamespace(token_to_kv_pool=pool, req_to_token_pool=SimpleNamespace(req_to_token=SLOTS))
    return import_module(f"{PLUGIN}.attention_backend").AtomAttentionBackend(runner)


def layer(**changes: Any) -> Any:
    radix = import_module("sglang.srt.layers.radix_attention").RadixAttention(4, 16, 0.25, 2, 1)
    vars(radix).update(changes)
    return radix


@pytest.mark.parametrize("window", [-1, 2])
def test_attention_of_a_prompt_and_of_a_decode(backend: Any, window: int) -> None:
    q, k, v = torch.rand(7, 64), torch.rand(7, 32), torch.rand(7, 32)
    found = []
    for mode, start, end in ((Mode.EXTEND, 0, 6), (Mode.DECODE, 6, 7)):
        batch = batch_of(mode, SLOTS, [end], [end - start])
        backend.init_forward_metadata(batch)
        run = backend.forward_decode if mode is Mode.DECODE else backend.forward_extend
        found.append(run(q[start:end], k[start:end], v[start:end], layer(sliding_window_size=window), batch))
    heads = [each.view(7, -1, 16).transpose(0, 1)[None] for each in (q, k, v)]
    distance = torch.arange(7)[:, None] - torch.arange(7)
    # SGLang's window counts the tokens before the current one.
    seen = (distance >= 0) & (distance <= (window if window >= 0 else 7))
    wanted = scaled_dot_product_attention(*heads, attn_mask=seen, scale=0.25, enable_gqa=True)
    torch.testing.assert_close(torch.cat(found), wanted[0].transpose(0, 1).flatten(1))


def test_keys_are_written_if_the_layer_says_so(backend: Any) -> None:
    batch = batch_of(Mode.EXTEND, SLOTS, [3], [3])
    backend.init_forward_metadata(batch)
    backend.forward_extend(torch.rand(3, 64), None, None, layer(), batch, save_kv_cache=False)
    assert not backend.token_to_kv_pool.k_buffer[1].any()
    backend.forward_extend(torch.rand(3, 64), torch.ones(3, 32), torch.ones(3, 32), layer(), batch)
    assert backend.token_to_kv_pool.k_buffer[1][4:7].all()


@pytest.mark.parametrize(
    ("changes", "more", "named"),
    [
        ({"logit_cap": 30.0}, {}, "a soft cap of the logits"),
        ({"is_cross_attention": True}, {}, "cross attention"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, {}, "encoder_only attention"),
        ({"v_head_dim": 8}, {}, "different sizes, as in SGLang's own MLA models"),
        ({}, {"q_rope": torch.zeros(1)}, "the argument q_rope"),
    ],
)
def test_attention_that_the_ops_lack_is_refused(
    backend: Any, changes: dict[str, Any], more: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        backend.forward_extend(None, None, None, layer(**changes), None, **more)


def test_graphs_are_refused(backend: Any) -> None:
    with pytest.raises(ValueError, match="--disable-cuda-graph"):
        backend.init_cuda_graph_state(8, 8)
