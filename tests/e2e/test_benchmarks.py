"""The offline benchmark runs and reports what was asked for."""

import json
import subprocess
import sys

import pytest

from tests.helpers.smollm2 import gguf_path


@pytest.mark.timeout(300)
def test_throughput_reports_every_concurrency() -> None:
    flags = ["--model", gguf_path(), "--max-model-len", "128", "--concurrency", "1", "4"]
    lengths = ["--input-len", "8", "--output-len", "6", "--rounds", "2", "--json"]
    command = [sys.executable, "-m", "atom.benchmarks.throughput", *flags, *lengths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["concurrency"] for row in rows] == [1, 4]
    assert all(row["output_tokens_per_s"] > 0 and row["tpot_ms"] > 0 for row in rows)
