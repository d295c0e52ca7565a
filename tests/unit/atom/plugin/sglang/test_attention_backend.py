"""SGLang's attention backend `atom` on layers of SGLang's own models, without SGLang."""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

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


@pytest.mark.parametrize(
    ("window", "cap", "chunked"), [(-1, 0.0, False), (2, 0.0, False), (-1, 0.3, False), (2, 0.0, True)]
)
def test_attention_of_a_prompt_and_of_a_decode(backend: Any, window: int, cap: float, chunked: bool) -> None:
    q, k, v = torch.rand(7, 64), torch.rand(7, 32), torch.rand(7, 32)
    found = []
    for mode, start, end in ((Mode.EXTEND, 0, 6), (Mode.DECODE, 6, 7)):
        batch = batch_of(mode, SLOTS, [end], [end - start])
        backend.init_forward_metadata(batch)
        run = backend.forward_decode if mode is Mode.DECODE else backend.forward_extend
        radix = layer(sliding_window_size=window, logit_cap=cap)
        more = {"chunked": True} if chunked else {}
        found.append(run(q[start:end], k[start:end], v[start:end], radix, batch, **more))
    q_HTE, k_HTE, v_HTE = (each.view(7, -1, 16).transpose(0, 1) for each in (q, k, v))
    scores = 0.25 * q_HTE @ k_HTE.repeat_interleave(2, 0).mT
    scores = cap * (scores / cap).tanh() if cap else scores
    at = torch.arange(7)
    # SGLang's window counts the tokens before the current one.
    first = (at // (window + 1) * (window + 1) if chunked else at - window) if window >= 0 else 0 * at
    seen = (at <= at[:, None]) & (at >= first[:, None])
    wanted = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v_HTE.repeat_interleave(2, 0)
    torch.testing.assert_close(torch.cat(found), wanted.transpose(0, 1).flatten(1))


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
