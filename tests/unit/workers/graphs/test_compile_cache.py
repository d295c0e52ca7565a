"""The levels on a CPU: the same tokens, what is compiled, and the directory of compiled code."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from atom.shared.config.cache import CacheConfig
from tests.helpers.checkpoints.tiny_models import checkpoint_of, engine_config, prompt_of, save_tiny, tiny
from tests.helpers.engine.core_side import generate
from tests.helpers.engine.teacher_forcing import TinyWorker
from workers.graphs import compile_cache
from workers.graphs.compile_cache import check_compiler, directory_of

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("ATOM_CACHE_DIR", str(tmp_path / "cache"))
    yield
    torch.compiler.reset()


def tokens(worker: TinyWorker) -> list[list[int]]:
    prompts = [prompt_of(length, length) for length in (64, 5, 37)]
    return generate(worker.core(), worker.execute, prompts, 12, chunk=24, stagger=2)


@pytest.mark.parametrize(
    ("name", "pieces"), [("llama-gqa", 3), ("gpt-oss", 3), ("deepseek-v3.2", 4), ("qwen3-next", 4)]
)
def test_a_traced_pass_gives_the_same_tokens(name: str, pieces: int, tmp_path: Path) -> None:
    """Layers of one shape share a piece; experts, MLA, recurrent states: all are opaque."""
    save_tiny(tiny(name), tmp_path)
    wanted = tokens(TinyWorker(tmp_path))
    worker = TinyWorker(tmp_path, level=1)
    assert worker.worker._model.forward.num_pieces == pieces  # type: ignore[attr-defined]
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert tokens(worker) == wanted
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled, "a step compiled again"


def test_the_directory_is_that_of_model_configuration_and_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tiny("llama-gqa"), tmp_path / "model")
    checkpoint, config = checkpoint_of(tmp_path / "model"), engine_config()
    found = directory_of(tmp_path, config, checkpoint, CPU)
    assert found == directory_of(tmp_path, config, checkpoint, CPU)
    other = dataclasses.replace(config, cache=CacheConfig(kv_cache_dtype="fp8"))
    wider = dataclasses.replace(checkpoint, hf_config=checkpoint.hf_config | {"hidden_size": 80})
    monkeypatch.setattr(compile_cache, "atom_version", lambda: "0.0")
    others = {
        directory_of(tmp_path, other, checkpoint, CPU),
        directory_of(tmp_path, config, wider, CPU),
        directory_of(tmp_path, config, checkpoint, CPU),
    }
    assert len(others | {found}) == 4


@pytest.mark.parametrize("given", ["", "torch", "user"])
def test_inductor_keeps_its_files_there_unless_the_user_names_another_directory(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch sets the variable, too, when it is imported."""
    values = {"": "", "torch": os.path.abspath(default_cache_dir()), "user": str(tmp_path / "user")}
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", values[given])
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    compile_cache._use(tmp_path / "ours")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / ("user" if given == "user" else "ours"))


def test_a_missing_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, str(tmp_path / "no-compiler")))
    with pytest.raises(ValueError, match=r"--level 2 on a CPU needs a C\+\+ compiler: install g\+\+"):
        check_compiler(CPU)
