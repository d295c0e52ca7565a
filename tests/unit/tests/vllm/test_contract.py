"""A version of vLLM that moved what the plugin uses fails by the name of that."""

import zipfile
from pathlib import Path

from tests.vllm.contract import check_contracts, missing

BACKEND = """
class AttentionBackend:
    @abstractmethod
    def get_name(): ...
    @abstractmethod
    def get_new_thing(): ...
    @classmethod
    def supported_kv_cache_layouts(cls): ...
class CommonAttentionMetadata:
    query_start_loc: int
class AttentionMetadataBuilder:
    def build(self, common_prefix_len, common_attn_metadata): ...
"""


def wheel(directory: Path, version: str) -> Path:
    path = directory / f"vllm-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/v1/attention/backend.py", BACKEND)
        archive.writestr("vllm/plugins/__init__.py", 'G = "vllm.general_plugins"')
    return path


def test_every_missing_name_is_listed(tmp_path: Path) -> None:
    found = list(missing(wheel(tmp_path, "0.33.0")))
    backend = "v1/attention/backend.py: "
    for wanted in (
        backend + "AttentionBackend.get_new_thing is abstract",
        backend + "CommonAttentionMetadata.seq_lens",
        backend + "AttentionMetadataBuilder.build(fast_build)",
        backend + "AttentionMetadataBuilder.__init__",
        "plugins/__init__.py: vllm.platform_plugins",
        "platforms/interface.py: Platform.get_attn_backend_cls",
        "config/cache.py: CacheConfig.block_size",
        "v1/kv_cache_interface.py: AttentionSpec.num_head_slots",
    ):
        assert wanted in found
    assert backend + "CommonAttentionMetadata.query_start_loc" not in found


def test_a_version_outside_of_the_range_is_named(tmp_path: Path) -> None:
    assert "vLLM 0.40.0 runs without it" in next(missing(wheel(tmp_path, "0.40.0")))


def test_a_directory_without_wheels_is_a_failure(tmp_path: Path) -> None:
    assert check_contracts(tmp_path) == {"contract": [f"{tmp_path} has no wheel of vLLM"]}
    assert check_contracts(None) == {"contract": ["--wheels names no directory"]}
