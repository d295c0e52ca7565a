"""What SGLang's entry point registers, without SGLang: its modules that it imports are stand-ins."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from atom.plugin.families import SGLANG
from atom.plugin.sglang import registration
from tests.helpers.plugins.sglang_host import HOOKED, Host, install

DEADLINE_S = 60


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    found = Host()
    install(monkeypatch, found)
    return found


def test_models_backends_and_hooks_are_registered_once(host: Host) -> None:
    for _ in range(2):
        registration.register()
    assert host.packages[0] == (registration.MODELS, True, True)
    assert host.choices == ["triton", "aiter", "atom"]
    assert set(host.backends) == {"atom", "aiter"}
    pools = "sglang.srt.mem_cache.memory_pool."
    assert {name: len(hooks) for name, hooks in host.hooks.items()} == {pools + name: 1 for name in HOOKED}


def test_sglang_does_not_import_its_own_models_if_it_imports_ours(host: Host) -> None:
    model = SimpleNamespace(__module__=f"{registration.MODELS}.atom_models")
    host.models |= dict.fromkeys(SGLANG.replaced(own_attention=True), model)
    registration.register()
    from sglang.srt.environ import envs

    assert envs.SGLANG_EXTERNAL_MODEL_PACKAGE.get() == registration.MODELS
    assert host.packages == []


def test_another_external_package_is_kept(host: Host) -> None:
    from sglang.srt.environ import envs

    envs.SGLANG_EXTERNAL_MODEL_PACKAGE.set("others")
    registration.register()
    assert envs.SGLANG_EXTERNAL_MODEL_PACKAGE.get() == "others" and len(host.packages) == 1


def test_the_plugin_can_be_disabled(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_DISABLE_SGLANG_PLUGIN", "1")
    registration.register()
    assert host.packages == [] and host.backends == {} and host.choices == ["triton", "aiter"]


def test_its_attention_can_be_disabled(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_DISABLE_SGLANG_PLUGIN_ATTENTION", "1")
    registration.register()
    assert len(host.packages) == 1
    assert host.backends == {} and host.hooks == {} and host.choices == ["triton", "aiter"]


def test_an_unknown_version_runs_without_it_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host = Host("0.5.24")
    install(monkeypatch, host)
    registration.register()
    assert host.packages == [] and "SGLang 0.5.24 runs without it" in caplog.text


def test_registration_imports_neither_sglang_nor_torch() -> None:
    code = "import sys, atom.plugin.sglang.registration; print({'sglang', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stdout.strip() == "set()", done.stderr
