"""A failed start prints its cause in one line, exits with the status for it and leaves nothing behind."""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from atom.shared.utils.exit_status import ExitStatus
from tests.helpers.servers.ports import kept_port
from tests.helpers.servers.random_server import ARGS, write_checkpoint

pytestmark = pytest.mark.timeout(400)

DEADLINE_S = 180.0  # a start that does not fail would run for ever


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("good") / "model")


@pytest.fixture
def model(good: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(good, tmp_path / "model"))


@pytest.fixture(autouse=True)
def own_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="t-") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        yield
        assert os.listdir(directory) == []


def failure(*args: str, status: ExitStatus, prepare: Callable[[], None] | None = None, **env: str) -> str:
    """The one line that a start with these flags ends with."""
    command = [sys.executable, "-m", "atom.entrypoints.openai_server", "--server-port", "0"]
    done = subprocess.run(
        [*command, "--host", "127.0.0.1", *args],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=os.environ | env,
        preexec_fn=prepare,
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and done.stderr.splitlines()[-1] == errors[0], done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert done.returncode == status, errors
    return errors[0]


def save_weights(directory: Path) -> Path:
    path = directory / "model.safetensors"
    save_file({"model.embed_tokens.weight": np.zeros((64, 64), np.float32)}, path)
    return path


def test_unknown_architecture(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "m", architectures=["MambaForCausalLM"], model_type="mamba")
    error = failure("--model", str(model), *ARGS, status=ExitStatus.MODEL)
    assert "architecture MambaForCausalLM is not supported; supported are: " in error
    assert "LlamaForCausalLM" in error


def test_overrides_that_weights_do_not_fit(model: Path) -> None:
    save_weights(model)
    flags = ("--model", str(model), "--device", "cpu", "--hf-overrides", '{"num_hidden_layers": 2}')
    error = failure(*flags, status=ExitStatus.MODEL)
    assert "the checkpoint lacks model.layers.0" in error
    assert '--hf-overrides {"num_hidden_layers": 2}' in error and "--load-dummy" in error


def test_broken_config(model: Path) -> None:
    (model / "config.json").write_text('{"architectures": [')
    assert "config.json is not valid JSON" in failure("--model", str(model), status=ExitStatus.MODEL)


def test_broken_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text('{"version": "1.0"')
    assert "tokenizer.json" in failure("--model", str(model), *ARGS, status=ExitStatus.MODEL)


def test_cut_off_weights(model: Path) -> None:
    path = save_weights(model)
    os.truncate(path, path.stat().st_size - 100)
    error = failure("--model", str(model), status=ExitStatus.MODEL)
    assert "model.safetensors is damaged" in error and "fetch it again" in error


def test_no_weights(model: Path) -> None:
    assert "has no safetensors files" in failure("--model", str(model), status=ExitStatus.MODEL)


def test_weights_of_another_model(model: Path) -> None:
    save_weights(model)
    error = failure("--model", str(model), "--device", "cpu", status=ExitStatus.MODEL)
    assert "worker 0: the checkpoint lacks model.layers.0" in error


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_unreadable_weights(model: Path) -> None:
    save_weights(model).chmod(0)
    assert "Permission denied" in failure("--model", str(model), status=ExitStatus.MODEL)


def test_busy_port(good: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        error = failure("--model", str(good), "--server-port", port, *ARGS, status=ExitStatus.RESOURCES)
    assert f"port {port}: it is in use; choose another --server-port" in error


def test_too_little_memory_for_one_block(good: Path) -> None:
    error = failure(
        *("--model", str(good), *ARGS, "--kv-cache-memory-bytes", "1000"), status=ExitStatus.RESOURCES
    )
    assert "1000 bytes for the KV cache" in error and "--kv-cache-memory-bytes" in error


def test_more_ranks_than_heads(good: Path) -> None:
    error = failure("--model", str(good), *ARGS, "-tp", "7", status=ExitStatus.USAGE)
    assert "--tensor-parallel-size 7 does not fit the model's 6 query and 2 key/value heads: use 6" in error


def test_too_few_open_files(good: Path) -> None:
    error = failure(
        *("--model", str(good), *ARGS),
        status=ExitStatus.RESOURCES,
        prepare=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100)),
    )
    assert "only 100 files may be open" in error and "ulimit" in error


def test_broken_chat_template(good: Path, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    flags = ("--model", str(good), *ARGS, "--chat-template", str(template))
    assert "No such file" in failure(*flags, status=ExitStatus.USAGE)
    template.write_text("\n{% for message in messages %}")
    assert "--chat-template" in failure(*flags, status=ExitStatus.USAGE)
    template.write_text("{% for message in messages %}{{ message.text }}{% endfor %}")
    assert "leaves out the text of user messages" in failure(*flags, status=ExitStatus.USAGE)


def test_a_path_too_long_for_sockets(good: Path, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    error = failure("--model", str(good), *ARGS, status=ExitStatus.RESOURCES, TMPDIR=str(long))
    assert "set TMPDIR to a shorter one" in error
    assert list(long.iterdir()) == []


def test_an_unreachable_hub() -> None:
    with kept_port() as port:
        error = failure(
            *("--model", "someone/something"),
            status=ExitStatus.RESOURCES,
            HF_ENDPOINT=f"http://127.0.0.1:{port}",
        )
    assert "cannot be reached" in error and "give a local directory" in error


def test_errors_of_variables_and_files(good: Path, tmp_path: Path) -> None:
    flags = ("--model", str(good), *ARGS)
    assert "ATOM_MAX_NUM_SEQS: 'many' is not a whole number" in failure(
        *flags, status=ExitStatus.USAGE, ATOM_MAX_NUM_SEQS="many"
    )
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps({"max-num-sequences": 3}))
    error = failure(*flags, "--config", str(file), status=ExitStatus.USAGE)
    assert f"{file}: max-num-sequences is not a setting: did you mean max_num_seqs?" in error


@pytest.mark.parametrize("kilobytes", [150_000, 1_000_000])
def test_too_little_memory_for_a_process(good: Path, kilobytes: int) -> None:
    limit = kilobytes * 1024
    error = failure(
        *("--model", str(good), *ARGS, "--kv-cache-memory-bytes", "3G"),
        status=ExitStatus.RESOURCES,
        prepare=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert "out of memory" in error


def test_an_unusable_home(model: Path) -> None:
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").unlink()
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    error = failure(
        *("--model", str(model), *ARGS),
        status=ExitStatus.RESOURCES,
        HOME="/proc/1/no-home",
        XDG_CACHE_HOME="",
        ATOM_CACHE_DIR="",
    )
    assert "cannot write to /proc/1/no-home" in error and "set ATOM_CACHE_DIR" in error
