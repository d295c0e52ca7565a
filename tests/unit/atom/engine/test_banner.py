"""The lines that a server prints once it is ready."""

import dataclasses
import json
import shlex

import pytest

from atom.engine.banner import banner
from atom.shared.config.cache import CacheConfig
from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.engine import EngineConfig
from atom.shared.config.model import ModelConfig
from atom.shared.config.server import ServerConfig
from atom.shared.config.speculative import SpeculativeConfig

PLAIN = Checkpoint("/m", "LlamaForCausalLM", "llama", {}, "float32", 100, 64)
BASE = dataclasses.replace(PLAIN, tokenizer_file="/m/tokenizer.json")
CHAT = dataclasses.replace(BASE, chat_template_file="/m/chat_template.jinja")
URL = "http://127.0.0.1:8000"


def lines(
    checkpoint: Checkpoint, server: ServerConfig | None = None, model: str = "a/b", **sections: object
) -> list[str]:
    config = EngineConfig(model=ModelConfig(model=model), **sections)  # type: ignore[arg-type]
    return banner(config, server or ServerConfig(), checkpoint, {"kv_tokens": 4096}, URL, None, 1.0)


def curl(checkpoint: Checkpoint, model: str = "a/b", api_key: str | None = None) -> list[str]:
    """The arguments of the command that the banner shows."""
    return shlex.split(lines(checkpoint, ServerConfig(api_key=api_key), model)[-1])


def test_a_command_that_the_model_answers() -> None:
    found = {name: curl(each) for name, each in (("chat", CHAT), ("base", BASE), ("plain", PLAIN))}
    assert found["chat"][1].endswith("/v1/chat/completions")
    assert found["base"][1] == found["plain"][1] == f"{URL}/v1/completions"
    bodies = {name: json.loads(command[-1]) for name, command in found.items()}
    assert bodies["chat"]["messages"][0]["role"] == "user"
    assert isinstance(bodies["base"]["prompt"], str) and bodies["plain"]["prompt"] == [1, 2, 3]
    assert json.loads(curl(CHAT, """it's "mine\"""")[-1])["model"] == """it's "mine\""""


def test_a_key_of_the_variable_is_used_and_no_key_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATOM_API_KEY", raising=False)
    assert "Authorization: Bearer YOUR_KEY" in curl(CHAT, api_key="secret,other")
    monkeypatch.setenv("ATOM_API_KEY", "secret,other")
    assert "Authorization: Bearer ${ATOM_API_KEY%%,*}" in curl(CHAT, api_key="secret,other")


def test_what_is_off_has_no_line() -> None:
    shown = "\n".join(lines(CHAT))
    assert "4,096 tokens" in shown and "KV tiers" not in shown and "drafts" not in shown


def test_tiers_and_drafts() -> None:
    cache = CacheConfig(kv_offload_memory=3 << 29, kv_offload_dir="/kv", kv_offload_disk=64 << 30)
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
    shown = "\n".join(lines(CHAT, cache=cache, speculative=drafts))
    assert "KV tiers  1.5 GiB of memory, 64 GiB of files in /kv" in shown
    assert "drafts    ngram, at most 4 a step" in shown
