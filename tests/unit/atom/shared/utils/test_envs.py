"""The table of environment variables."""

from pathlib import Path

import pytest

from atom.shared.utils import envs


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in envs.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_unset_and_empty_variables_have_their_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert envs.ATOM_DP_SIZE == 1
    monkeypatch.setenv("ATOM_DP_SIZE", "")
    assert envs.ATOM_DP_SIZE == 1
    assert not envs.is_set("ATOM_DP_SIZE")


def test_values_are_read_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOM_DP_SIZE", "8")
    assert envs.ATOM_DP_SIZE == 8
    assert envs.is_set("ATOM_DP_SIZE")


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("TRUE", True), ("on", True), ("0", False), ("no", False)]
)
def test_switches(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    monkeypatch.setenv("ATOM_LOG_MORE", text)
    assert envs.ATOM_LOG_MORE is value


@pytest.mark.parametrize(
    ("name", "text"), [("ATOM_LOG_MORE", "maybe"), ("ATOM_DP_SIZE", "two"), ("ATOM_DP_SIZE", "-1")]
)
def test_bad_values_name_variable_and_value(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"{name}='{text}'.*use"):
        getattr(envs, name)
    with pytest.raises(ValueError, match=name):
        envs.startup_notes("cpu")


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="ATOM_NO_SUCH"):
        _ = envs.ATOM_NO_SUCH


def test_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert envs.ATOM_CACHE_DIR == "/home/someone/.cache/atom"
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert envs.ATOM_CACHE_DIR == "/caches/atom"
    monkeypatch.setenv("ATOM_CACHE_DIR", "/mine")
    assert envs.ATOM_CACHE_DIR == "/mine"


def test_variables_without_effect_get_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert envs.startup_notes("cpu") == []
    monkeypatch.setenv("ATOM_USE_TRITON_GEMM", "1")
    monkeypatch.setenv("ATOM_ENABLE_DS_QKNORM_FUSION", "1")  # its default: asks for nothing
    monkeypatch.setenv("ATOM_LOG_MORE", "1")
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    for device in ("cpu", "cuda"):
        (note,) = envs.startup_notes(device)
        assert note.startswith("ATOM_USE_TRITON_GEMM=1 has no effect: ")
    assert envs.startup_notes("cuda", rocm=True) == []
    monkeypatch.setenv("ATOM_ENABLE_ALLREDUCE_RMSNORM_FUSION", "0")
    assert len(envs.startup_notes("cuda")) == 1
    assert any(
        "ALLREDUCE_RMSNORM_FUSION=0 has no effect: its kernels" in note for note in envs.startup_notes("cpu")
    )


def test_names_of_the_users_documents_exist() -> None:
    documented = {
        *(f"ATOM_DP_{part}" for part in ("RANK", "RANK_LOCAL", "SIZE", "MASTER_IP", "MASTER_PORT")),
        *("ATOM_DISABLE_MMAP", "ATOM_DISABLE_VLLM_PLUGIN", "ATOM_DISABLE_VLLM_PLUGIN_ATTENTION"),
        *("ATOM_DISABLE_SGLANG_PLUGIN", "ATOM_DISABLE_SGLANG_PLUGIN_ATTENTION"),
        *("ATOM_USE_TRITON_GEMM", "ATOM_USE_TRITON_MXFP4_BMM", "ATOM_ENABLE_ALLREDUCE_RMSNORM_FUSION"),
        *("ATOM_ENABLE_DS_INPUT_RMSNORM_QUANT_FUSION", "ATOM_ENABLE_DS_QKNORM_FUSION"),
        *("ATOM_ENABLE_DS_QKNORM_QUANT_FUSION", "ATOM_DUAL_STREAM_MOE_TOKEN_THRESHOLD"),
        *("ATOM_ENABLE_QK_NORM_ROPE_CACHE_QUANT_FUSION", "ATOM_ROPE_FUSED_QKNORM"),
        "ATOM_LLAMA_ENABLE_AITER_TRITON_FUSED_RMSNORM_QUANT",
        "ATOM_LLAMA_ENABLE_AITER_TRITON_FUSED_SILU_MUL_QUANT",
        *("ATOM_PROFILER_MORE", "ATOM_LOG_MORE"),
        *("OPENAI_API_KEY", "VLLM_USE_MODELSCOPE", "SAVE_TO_PYTORCH_BENCHMARK_FORMAT"),
    }
    assert documented <= envs.VARIABLES.keys()


def test_a_user_without_a_home_needs_a_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("ATOM_CACHE_DIR", raising=False)
    with pytest.raises(ValueError, match="set ATOM_CACHE_DIR to a writable directory"):
        _ = envs.ATOM_CACHE_DIR
