"""Names on a hub: fetched once, found again without it, and one line for everything that goes wrong."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save

from atom.shared.config.model import ModelConfig
from atom.shared.config.speculative import SpeculativeConfig
from atom.shared.messages.launch import PrepareLaunch
from atom.shared.utils.exit_status import ExitStatus
from atom.shared.utils.process import spawn
from tests.helpers.checkpoints.fake_hub import COMMIT, TOKEN, FakeHub
from tests.helpers.checkpoints.gguf_files import hf_weights, write_gguf
from tests.helpers.servers.ports import kept_port
from workers.checkpoint.chat_templates import V4_ENCODER
from workers.checkpoint.hub import is_hub_name

NAME = "someone/Tiny-1.5"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "max_position_embeddings": 2048,
    "dtype": "float32",
}
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "model.safetensors": save({"a": np.ones((100, 100), np.float32)}),
    "chat_template.jinja": b"{{ messages }}",
    "README.md": b"words",
    "pytorch_model.bin": b"the same again",
    "original/config.json": b"{}",
    "original/model.safetensors": b"the same again",
    "consolidated.safetensors": b"the same again",
    TOOL_TEMPLATE: b"{{ tools }}",
    V4_ENCODER: b"raise SystemExit",
    "encoding/tests/test_input_1.json": b"{}",
}
DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def hub_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HF_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.chdir(tmp_path)


def prepared(
    cache: Path, model: str = NAME, speculative: SpeculativeConfig | None = None, **more: Any
) -> tuple[int, dict[str, Any]]:
    """Exit status and output of a preparation process: the library reads its settings only once."""
    drafts = speculative or SpeculativeConfig()
    launch = PrepareLaunch(ModelConfig(model=model, **more), str(cache), "", drafts)
    child = spawn("workers.checkpoint.prepare", launch, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    with child.stdin, child.stdout:
        status = child.wait(timeout=DEADLINE_S)
        (line,) = child.stdout.read().splitlines()
    return status, msgspec.json.decode(line)


def error_of(cache: Path, model: str = NAME, status: int = ExitStatus.MODEL, **more: Any) -> str:
    found, response = prepared(cache, model, **more)
    assert found == status, response
    assert "\n" not in response["error"]
    return str(response["error"])


@pytest.mark.parametrize(
    ("text", "is_name"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("owner/name:file-Q4_K_M.gguf", True),
        ("owner/name:Q4_K_M", True),
        ("./models/mine", False),
        ("/models/mine", False),
        ("models/mine/deep", False),
        ("../mine", False),
        ("~/mine", False),
        ("mine", False),
        ("models/", False),
    ],
)
def test_names_are_distinguished_from_paths(text: str, is_name: bool) -> None:
    assert is_hub_name(text) is is_name


def test_what_is_needed_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeHub(NAME, FILES) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        status, response = prepared(tmp_path)
        assert status == 0, response
        checkpoint = response["checkpoint"]
        assert checkpoint["vocab_size"] == 300
        directory = Path(checkpoint["directory"])
        assert COMMIT in directory.parts and directory.is_relative_to(tmp_path / "hf")
        assert (directory / "model.safetensors").read_bytes() == FILES["model.safetensors"]
        assert Path(checkpoint["chat_template_file"]).read_text() == "{{ messages }}"
        wanted = ("config.json", "model.safetensors", "chat_template.jinja", TOOL_TEMPLATE, V4_ENCODER)
        assert hub.fetched == dict.fromkeys(wanted, 1)
        assert prepared(tmp_path)[1] == response
        assert hub.fetched.total() == 5
    begun = time.monotonic()
    assert prepared(tmp_path)[1] == response, "the hub is gone, the cache is not"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert prepared(tmp_path)[1] == response
    assert time.monotonic() - begun < 100


def test_a_draft_model_is_fetched_if_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config.json is checked before its weights are downloaded."""
    drafts = SpeculativeConfig("draft_model", 2, draft_model=NAME)
    for name, vocab_size in (("fits", 300), ("other", 301)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": vocab_size}))
        (tmp_path / name / "model.safetensors").write_bytes(FILES["model.safetensors"])
    with FakeHub(NAME, FILES) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        error = error_of(tmp_path, str(tmp_path / "other"), speculative=drafts)
        assert "a vocabulary of 300 ids, and the model one of 301" in error
        assert hub.fetched == {"config.json": 1}
        status, response = prepared(tmp_path, str(tmp_path / "fits"), drafts)
    assert status == 0, response
    assert response["checkpoint"]["directory"] == str(tmp_path / "fits")
    assert (Path(response["draft_model"]) / "model.safetensors").is_file()


def test_revision_and_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeHub(NAME, FILES) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        status, response = prepared(tmp_path, revision=COMMIT, download_dir=str(tmp_path / "here"))
        assert status == 0, response
        assert Path(response["checkpoint"]["directory"]).is_relative_to(tmp_path / "here")
        assert "has no revision old: check --revision" in error_of(tmp_path, revision="old")


def test_random_weights_are_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeHub(NAME, FILES) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert prepared(tmp_path, load_dummy=True)[0] == 0
        assert hub.fetched == dict.fromkeys(
            ("config.json", "chat_template.jinja", TOOL_TEMPLATE, V4_ENCODER), 1
        )
        assert prepared(tmp_path)[0] == 0, "they are fetched once they are wanted"
        assert hub.fetched["model.safetensors"] == 1


def test_weights_of_what_does_not_run_are_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CONFIG | {"architectures": ["MambaForCausalLM"], "auto_map": {"AutoModel": "m.M"}}
    with FakeHub(NAME, FILES | {"config.json": json.dumps(config).encode(), "m.py": b"1/0"}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        error = error_of(tmp_path)
        assert error.startswith("architecture MambaForCausalLM is not supported; the checkpoint's own code")
        assert "LlamaForCausalLM" in error
        assert hub.fetched == {"config.json": 1}
        overrides = '{"architectures": ["LlamaForCausalLM"]}'
        assert prepared(tmp_path, hf_overrides=overrides)[0] == 0, "the user says that it is one"
        assert hub.fetched["model.safetensors"] == 1 and hub.fetched["m.py"] == 0


def test_a_private_or_gated_model_opens_with_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for trouble, words in (("RepoNotFound", "no such model, or it is private"), ("GatedRepo", "is gated")):
        with FakeHub(NAME, FILES, trouble) as hub:
            monkeypatch.setenv("HF_ENDPOINT", hub.url)
            monkeypatch.delenv("HF_TOKEN", raising=False)
            error = error_of(tmp_path)
            assert words in error and "HF_TOKEN" in error
            monkeypatch.setenv("HF_TOKEN", TOKEN)
            assert prepared(tmp_path, download_dir=str(tmp_path / trouble))[0] == 0


def test_an_unknown_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeHub(NAME, FILES) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        error = error_of(tmp_path, "someone/else")
    assert error.startswith(f"--model someone/else: no such path, and {hub.url} has no such model")


def test_gguf_repositories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"model-Q8_0.gguf": b"no gguf at all", "README.md": b"words"}
    with FakeHub(NAME, files) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert f"such as --model {NAME}:model-Q8_0.gguf" in error_of(tmp_path)
        assert "has no file other.gguf: name one of its GGUF files" in error_of(
            tmp_path, f"{NAME}:other.gguf"
        )
        assert "model-Q8_0.gguf is not a readable GGUF file" in error_of(tmp_path, f"{NAME}:model-Q8_0.gguf")
        assert hub.fetched == {"model-Q8_0.gguf": 1}


def test_all_parts_of_a_quantization_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "m-Q4_K_M.gguf", hf_weights(), tensors_per_part=6)
    parts = {f"Q4_K_M/{path.name}": path.read_bytes() for path in tmp_path.glob("*.gguf")}
    assert len(parts) == 2
    with FakeHub(NAME, parts | {"m-Q8_0.gguf": b"x", "mmproj-Q4_K_M.gguf": b"x"}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        status, response = prepared(tmp_path, f"{NAME}:{min(parts)}")
        assert status == 0, response
        assert prepared(tmp_path, f"{NAME}:q4_k_m")[1] == response
        assert hub.fetched == dict.fromkeys(parts, 1)
    assert prepared(tmp_path, f"{NAME}:q4_k_m")[1] == response, "the hub is gone, the cache is not"


@pytest.mark.slow
def test_quantizations_that_are_not_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"a-Q8_0.gguf": b"x", "b-Q8_0.gguf": b"x", "c-Q4_0-00001-of-00002.gguf": b"x"}
    with FakeHub(NAME, files) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert "has no GGUF model Q5_0: name one of its GGUF files, such as" in error_of(
            tmp_path, f"{NAME}:Q5_0"
        )
        assert "several GGUF models Q8_0: name one, of a-Q8_0.gguf, b-Q8_0.gguf" in error_of(
            tmp_path, f"{NAME}:Q8_0"
        )
        assert "has no file c-Q4_0-00002-of-00002.gguf" in error_of(tmp_path, f"{NAME}:Q4_0")


def test_an_interrupted_download_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeHub(NAME, FILES) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.breaks_off = True
        begun = time.monotonic()
        error = error_of(tmp_path, status=ExitStatus.RESOURCES)
        assert f"the download of {NAME} failed" in error and "start again" in error
        assert time.monotonic() - begun < 100
        hub.breaks_off = False
        assert prepared(tmp_path)[0] == 0


def test_no_hub_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kept_port() as port:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        begun = time.monotonic()
        error = error_of(tmp_path, status=ExitStatus.RESOURCES)
    assert time.monotonic() - begun < 100
    assert "cannot be reached" in error and "give a local directory" in error
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE forbids downloading it" in error_of(tmp_path, status=ExitStatus.RESOURCES)


def test_a_hub_that_does_not_respond(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        begun = time.monotonic()
        error = error_of(tmp_path, status=ExitStatus.RESOURCES)
    assert "cannot be reached" in error and "Timeout" in error
    assert time.monotonic() - begun < 100


def test_progress_grows_to_the_size_of_the_files(tmp_path: Path) -> None:
    with FakeHub(NAME, FILES) as hub:
        code = (
            "import json; from pathlib import Path; from workers.checkpoint.hub import fetch; reports = [];"
            f"fetch({NAME!r}, None, {str(tmp_path / 'here')!r}, lambda *each: reports.append(each), bool);"
            "print(json.dumps(reports))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            check=True,
            timeout=DEADLINE_S,
            env=os.environ | {"HF_ENDPOINT": hub.url, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    reports = json.loads(done.stdout)
    size = sum(
        len(FILES[name]) for name in ("model.safetensors", "chat_template.jinja", TOOL_TEMPLATE, V4_ENCODER)
    )
    assert {phase for phase, _, _ in reports} == {f"Downloading {NAME}"}
    assert {total for _, _, total in reports} == {size}
    counts = [done for _, done, _ in reports]
    assert counts == sorted(counts) and counts[-1] == size and len(counts) > 1
