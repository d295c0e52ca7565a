"""The benchmark of vLLM with and without the plugin, with a stand-in for vLLM."""

import os
import sys
from pathlib import Path

import pytest

from benchmarks import plugin_speed
from tests.helpers.source import ROOT

VLLM = """
import os, time
from types import SimpleNamespace

class SamplingParams:
    def __init__(self, max_tokens, **others):
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, model, **settings):
        print("noise of a host")
        variant = "alone" if "ATOM_DISABLE_VLLM_PLUGIN" in os.environ else "plugin"
        open(os.path.join(model, variant), "w").close()
        config = SimpleNamespace(get_vocab_size=lambda: 9)
        self.llm_engine = SimpleNamespace(model_config=config)

    def generate(self, prompts, sampling, use_tqdm):
        time.sleep(sampling.max_tokens * 1e-5)
        output = SimpleNamespace(outputs=[SimpleNamespace(token_ids=range(sampling.max_tokens))])
        return [output] * len(prompts)
"""


def test_both_engines_have_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vllm.py").write_text(VLLM)
    model = tmp_path / "small"
    model.mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(tmp_path)]))
    monkeypatch.setattr(sys, "argv", ["plugin_speed", str(model), "--seconds", "100", "--log", str(tmp_path)])
    plugin_speed.main()
    printed = capsys.readouterr().out
    assert sorted(path.name for path in model.iterdir()) == ["alone", "plugin"]
    for row in plugin_speed.ROWS:
        assert printed.count(row.name) == 3, printed
    assert printed.count("x of vLLM alone") == len(plugin_speed.ROWS)
    assert "noise" not in printed and "noise of a host" in (tmp_path / "small.plugin.log").read_text()


def test_a_model_is_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["plugin_speed"])
    with pytest.raises(SystemExit):
        plugin_speed.main()
    assert "name a model's directory" in capsys.readouterr().err
