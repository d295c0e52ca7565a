"""Nine faults that a plugin of SGLang has had, one test each: ours has none of them."""

import ast
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atom.shared.utils import envs
from atom_ops import write_kv
from atom_ops.ops.attention.kv_cache import read_kv
from tests.helpers.plugins.sglang_host import PLUGIN, Host, Mode, batch_of, install, make_pool
from tests.helpers.source import ROOT

FP8 = torch.float8_e4m3fn
SOURCES = sorted((ROOT / "atom/plugin").rglob("*.py"))


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    found = Host()
    install(monkeypatch, found)
    return found


def made_pool(**changes: Any) -> Any:
    pool = make_pool(**changes)
    import_module(f"{PLUGIN}.kv_pool").create_kv(lambda pool: None, pool)
    return pool


def test_1_the_command_line_is_not_parsed(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [])
    import_module(f"{PLUGIN}.registration").register()
    assert "atom" in host.backends
    assert not [path for path in SOURCES if "sys.argv" in path.read_text()]


def test_2_settings_of_rope_are_kept(host: Host) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, "original_max_position_embeddings": 64}
    settings = {
        "model_type": "qwen3", "vocab_size": 10, "max_position_embeddings": 256,
        "rope_parameters": dict(yarn),
    }  # fmt: skip
    config = SimpleNamespace(to_dict=lambda: settings)
    checkpoint = import_module(f"{PLUGIN}.host_config").checkpoint_of(config, "Qwen3ForCausalLM")
    assert checkpoint.hf_config["rope_parameters"] == yarn


def test_3_comments_spell_field() -> None:
    assert not [path for path in SOURCES if "filed" in path.read_text()]


@pytest.mark.parametrize("value", ["0", "1"])
def test_4_the_switch_has_the_name_that_it_is_known_by(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("AITER_ROPE_FUSED_QKNORM", str(1 - int(value)))
    monkeypatch.setenv("ATOM_ROPE_FUSED_QKNORM", value)
    assert envs.ATOM_ROPE_FUSED_QKNORM is (value == "1")
    assert not [path for path in SOURCES if "AITER_ROPE" in path.read_text()]


def test_5_aiter_that_is_missing_is_an_import_error(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiter", None)
    import_module(f"{PLUGIN}.registration").register()
    with pytest.raises(ImportError, match=r"--attention-backend aiter needs AITER .*atom needs none"):
        host.backends["aiter"](SimpleNamespace())


def test_6_padding_is_masked_in_each_write(host: Host) -> None:
    """No `return` of a Triton kernel depends on a value of a tensor: padding is a mask."""
    layer = import_module(f"{PLUGIN}.kv_pool").kv_layer(made_pool(), 0)
    k, v = torch.ones(2, 3, 2, 16)
    write_kv(k, v, layer, torch.tensor([5, -1, -1]))
    assert layer.kv.flatten(0, 1)[5].all() and int(layer.kv.any(-1).sum()) == 4
    for path in (ROOT / "atom_ops/triton_impl/attention").glob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and "triton.jit" in map(
                ast.unparse, function.decorator_list
            ):
                early = [each for each in ast.walk(function) if isinstance(each, ast.If)]
                tests = [ast.unparse(each.test) for each in early if isinstance(each.body[0], ast.Return)]
                assert not [text for text in tests if "slot" in text], (path, tests)


def test_7_the_writer_knows_the_dtype_of_the_cache(host: Host) -> None:
    pool = made_pool(dtype=FP8)
    backend = _backend(pool)
    slots_RT = torch.arange(4, 12, dtype=torch.int32).view(1, 8)
    batch = batch_of(Mode.EXTEND, slots_RT, [8], [8])
    backend.init_forward_metadata(batch)
    q, k, v = torch.rand(3, 8, 32) * 5000
    radix = import_module("sglang.srt.layers.radix_attention").RadixAttention(2, 16, 0.01, 2, 0)
    backend.forward_extend(q, k, v, radix, batch)
    found = read_kv(import_module(f"{PLUGIN}.kv_pool").kv_layer(pool, 0), batch.out_cache_loc, torch.float32)
    # The largest number of float8_e4m3fn is 448: without scales they would be cut off.
    torch.testing.assert_close(found, torch.stack([k, v], 1).view(8, 2, 2, 16), rtol=0.07, atol=6)


def test_8_scales_are_on_the_device_of_the_cache(host: Host) -> None:
    pool = made_pool(dtype=FP8, device="meta")
    layer = import_module(f"{PLUGIN}.kv_pool").kv_layer(pool, 0)
    assert layer.scale is not None and layer.scale.device == layer.kv.device == torch.device("meta")


def test_9_imports_come_first() -> None:
    for path in SOURCES:
        kinds = [isinstance(each, ast.Import | ast.ImportFrom) for each in ast.parse(path.read_text()).body]
        docstring = 1
        assert all(kinds[docstring : docstring + sum(kinds)]), path


def _backend(pool: Any) -> Any:
    requests = SimpleNamespace(req_to_token=torch.arange(4, 12, dtype=torch.int32).view(1, 8))
    runner = SimpleNamespace(token_to_kv_pool=pool, req_to_token_pool=requests)
    return import_module(f"{PLUGIN}.attention_backend").AtomAttentionBackend(runner)
