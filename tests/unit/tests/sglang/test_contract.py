"""A version of SGLang that moved what the plugin uses fails by the name of that."""

import zipfile
from pathlib import Path

from tests.sglang.contract import check_contracts, missing

BACKEND = """
class AttentionBackend:
    def init_forward_metadata(self, batch): ...
    def support_triton(self): ...
"""


def wheel(directory: Path, version: str) -> Path:
    path = directory / f"sglang-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("sglang/srt/layers/attention/base_attn_backend.py", BACKEND)
    return path


def test_every_missing_name_is_listed(tmp_path: Path) -> None:
    found = list(missing(wheel(tmp_path, "0.5.23")))
    backend = "srt/layers/attention/base_attn_backend.py: AttentionBackend."
    for wanted in (
        backend + "init_forward_metadata(forward_batch)",
        backend + "forward_extend",
        "srt/mem_cache/memory_pool.py: MHATokenToKVPool._create_buffers_normal",
        "srt/mem_cache/memory_pool.py: MLATokenToKVPool.kv_buffer",
        "srt/arg_groups/fields/parallel.py: Parallel.tp_size",
        "srt/plugins/__init__.py: sglang.srt.plugins",
    ):
        assert wanted in found
    assert backend + "support_triton" not in found


def test_another_version_is_named(tmp_path: Path) -> None:
    assert "SGLang 0.5.30 runs without it" in next(missing(wheel(tmp_path, "0.5.30")))


def test_a_directory_without_wheels_is_a_failure(tmp_path: Path) -> None:
    assert check_contracts(tmp_path) == {"contract": [f"{tmp_path} has no wheel of SGLang"]}
