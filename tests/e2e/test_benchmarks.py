"""The offline benchmarks run and report what was asked for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from atom import LLMEngine, SamplingParams
from benchmarks.gpu_runs.gpu_rows import ROWS
from tests.helpers.checkpoints.smollm2 import gguf_path

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


@pytest.fixture
def config_alone(tmp_path: Path) -> Path:
    directory = tmp_path / "Tiny-1.5"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def run_benchmark(name: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{name}", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_latency_measures_a_batch(config_alone: Path, tmp_path: Path) -> None:
    file = tmp_path / "latency.json"
    model = ["--model", str(config_alone), "--load-dummy", "--device", "cpu"]
    batch = ["--batch-size", "3", "--input-len", "8", "--output-len", "6", "--n", "2"]
    counts = ["--num-iters-warmup", "1", "--num-iters", "4", "--output-json", str(file)]
    done = run_benchmark("latency", *model, *batch, *counts)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert len(result["latencies"]) == 4
    assert 0 < result["avg_ttft"] < result["avg_latency"] and result["avg_tpot"] > 0
    assert result["output_tokens_per_second"] == pytest.approx(4 * 3 * 2 * 6 / sum(result["latencies"]))
    assert f"--model {config_alone.name} --load-dummy" in result["command"]
    too_long = run_benchmark("latency", *model, "--input-len", "512", "--output-len", "6")
    assert too_long.returncode == 1 and too_long.stderr.splitlines()[-1].startswith(
        "error: the model's maximum"
    )


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_the_simulation_is_compared_with_a_real_run(model: str, tmp_path: Path) -> None:
    file = tmp_path / "check.json"
    engine = ["--model", model, "--load-dummy", "--device", "cpu", "--cpu-threads", "1"]
    engine += ["--kv-cache-memory-bytes", str(1 << 27)]
    counts = ["--num-prompts", "12", "--repeat", "1", "--output-json", str(file)]
    done = run_benchmark("simulation_check", *engine, *counts)
    assert done.returncode == 0, done.stderr
    [found] = json.loads(file.read_text())["rounds"]
    assert sum(found["seconds_of_step_token_pair"]) > 0
    # How close it is depends on what else the machine does.
    assert found["measured"].keys() == found["predicted"].keys() == found["error"].keys()
    assert all(value > 0 for value in found["measured"].values()) and "predicted" in done.stdout


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_throughput_of_random_prompts(config_alone: Path, tmp_path: Path) -> None:
    file = tmp_path / "throughput.json"
    model = ["--model", str(config_alone), "--load-dummy", "--device", "cpu", "--output-json", str(file)]
    lengths = ["--input-len", "8", "--output-len", "6", "--prefix-len", "4", "--num-prompts", "20"]
    done = run_benchmark("throughput", *model, *lengths)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert (result["num_requests"], result["total_input_tokens"], result["total_output_tokens"]) == (
        20,
        240,
        120,
    )
    assert result["tokens_per_second"] == pytest.approx(360 / result["elapsed_time"])
    assert "20 requests, 240 prompt tokens and 120 generated tokens" in done.stdout


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_throughput_of_conversations(tmp_path: Path) -> None:
    turns = [
        ("Say the alphabet, please.", "a b c d e f"),
        ("Now count to five for me.", "one two three four five"),
    ]
    rows = [
        {"conversations": [{"from": "human", "value": asked}, {"from": "gpt", "value": said}]}
        for asked, said in turns
    ]
    data, file = tmp_path / "sharegpt.json", tmp_path / "throughput.json"
    data.write_text(json.dumps(rows))
    flags = ["--model", gguf_path(), "--max-model-len", "128", "--dataset-name", "sharegpt"]
    places = ["--dataset-path", str(data), "--output-json", str(file)]
    done = run_benchmark("throughput", *flags, *places, "--num-prompts", "2")
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert (result["dataset"], result["num_requests"], result["total_output_tokens"]) == (
        "sharegpt",
        2,
        6 + 5,
    )


def run_gpu_benchmark(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    places = ["--results", str(folder / "results"), "--document", str(folder / "docs/benchmarks.md")]
    command = [sys.executable, "-m", "benchmarks.gpu", *places, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_gpu_benchmark_measures_what_is_missing_and_writes_the_document(
    config_alone: Path, tmp_path: Path
) -> None:
    flags = ["--models", str(config_alone), "--shrink", "16", "--device", "cpu", "--max-model-len", "512"]
    done = run_gpu_benchmark(tmp_path, *flags)
    assert done.returncode == 0, done.stderr
    file, document = tmp_path / "results/Tiny-1.5.json", tmp_path / "docs/benchmarks.md"
    rows = json.loads(file.read_text())["rows"]
    assert set(rows) == set(ROWS) and all(row["value"] > 0 for row in rows.values())
    first = document.read_text()
    assert "CPU: " in first and all(f"| `{name}` |" in first for name in ROWS)
    again = run_gpu_benchmark(tmp_path, *flags)
    assert again.returncode == 0 and "starting" not in again.stdout
    assert document.read_text() == first and json.loads(file.read_text())["rows"] == rows
    other = run_gpu_benchmark(tmp_path, *flags, "--max-num-seqs", "8")
    assert other.returncode == 1 and "was measured with other options" in other.stderr


@pytest.mark.timeout(300)
def test_the_gpu_benchmark_keeps_its_time_limit(config_alone: Path, tmp_path: Path) -> None:
    flags = ["--models", str(config_alone), "--device", "cpu", "--max-model-len", "512"]
    done = run_gpu_benchmark(tmp_path, *flags, "--time-limit", "0.5", "--rows", "ready")
    assert done.returncode == 1 and "out of time" in done.stderr


@pytest.mark.timeout(300)
def test_random_weights_need_a_config_alone_and_serve_ids_alone(config_alone: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLMEngine(model=str(config_alone), load_dummy=True, device="cpu") as engine:
        outputs = engine.generate([[1, 2, 3], [4, 5, 6]], params)
        assert [output["num_tokens_output"] for output in outputs] == [8, 8]
        assert outputs[0]["token_ids"] != outputs[1]["token_ids"] and outputs[0]["text"] == ""
        with pytest.raises(ValueError, match=r"no tokenizer: send the prompt as token ids$"):
            engine.generate(["text"], params)
        assert engine.gpu_names == []
