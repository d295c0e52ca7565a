"""The memory of the KV cache, and its dtypes."""

from pathlib import Path

import pytest
import torch

from atom.shared.config.cache import CacheConfig
from atom.shared.utils.logger import get_logger
from workers.memory.kv_cache import available_memory, cpu_kv_bytes, cuda_kv_bytes, kv_dtype


def test_kv_memory_on_a_cpu() -> None:
    assert cpu_kv_bytes(CacheConfig(kv_cache_memory_bytes=123), workers=2) == 123
    alone, shared = (cpu_kv_bytes(CacheConfig(), workers) for workers in (1, 64))
    assert 0 < shared <= alone <= 4 << 30


def test_kv_memory_on_a_gpu_that_others_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch holds 300 of 1,000 MiB and, unless a case says otherwise, a step needs 200."""
    logged: list[str] = []

    def kv_mib(share: float, used_before: int, free: int, peak: int = 200) -> int:
        for name, value in (("mem_get_info", (free << 20, 1000 << 20)), ("memory_reserved", 300 << 20)):
            monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
        config = CacheConfig(gpu_memory_utilization=share)
        return cuda_kv_bytes(config, torch.device("cuda", 0), peak << 20, used_before << 20) >> 20

    monkeypatch.setattr(get_logger(), "warning", lambda text, *values: logged.append(text % values))
    # 20 MiB outside of torch are this worker's.
    assert kv_mib(0.9, used_before=0, free=680) == 900 - 200 - 20
    # Two servers with half of the GPU each: the second has as much as the first.
    assert kv_mib(0.5, used_before=0, free=680) == kv_mib(0.5, used_before=400, free=280) == 500 - 200 - 20
    assert not logged
    # What others use is not there, whatever the share; a little stays free.
    assert kv_mib(0.9, used_before=400, free=280) == 280 + 300 - 200 - 20
    assert logged == [
        "cuda:0: the KV cache gets 360 MiB; --gpu-memory-utilization 0.9 allows 680, but 400 MiB were in use "
        "when this worker started"
    ]
    # A process that used memory when this worker started has ended.
    assert kv_mib(0.9, used_before=400, free=680) == 900 - 200
    with pytest.raises(MemoryError, match=r"of its 1000 MiB, 690 were in use .* take 300, .* allows 90%"):
        kv_mib(0.9, used_before=690, free=10, peak=300)


def test_kv_dtypes() -> None:
    found = {
        name: kv_dtype(CacheConfig(kv_cache_dtype=name), torch.float16) for name in ("auto", "bf16", "fp8")
    }
    assert found == {"auto": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
    with pytest.raises(ValueError, match="'int4' is not supported; supported are: auto, bf16, fp8"):
        kv_dtype(CacheConfig(kv_cache_dtype="int4"), torch.float16)


def test_the_page_cache_of_a_control_group_is_available(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("50000\n")
    (tmp_path / "memory.current").write_text("40000\n")
    assert available_memory(tmp_path) == 10_000
    (tmp_path / "memory.stat").write_text("anon 9000\nactive_file 20000\ninactive_file 10000\nshmem 1000\n")
    assert available_memory(tmp_path) == 40_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(tmp_path) > 1 << 20
