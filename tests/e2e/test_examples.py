"""The shipped examples, as a user runs them."""

import subprocess
import sys

import pytest

from tests.helpers.checkpoints.smollm2 import gguf_path


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_simple_inference() -> None:
    flags = ["--model", gguf_path(), "--kv_cache_dtype", "fp8", "--max-model-len", "512"]
    command = [sys.executable, "-m", "atom.examples.simple_inference", *flags]
    done = subprocess.run(
        [*command, "--temperature", "0.6", "--max-tokens", "24"], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Response: ") == 4
    assert "tokens in, 24 out" in done.stdout or "eos" in done.stdout
