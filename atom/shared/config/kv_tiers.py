"""Checks of the flags of KV tiers, and of engines that hand over blocks through one."""

from atom.shared.config.cache import CacheConfig
from atom.shared.config.fields import ConfigError
from atom.shared.config.kv_peers import check_prompt_transfer
from atom.shared.config.kv_transfer import kv_role, nixl_problem, reads_peers
from atom.shared.config.parallel import ParallelConfig
from atom.shared.utils.redis_client import hiredis_problem, parse_redis_url

__all__ = ["check_kv_tiers"]


def check_kv_tiers(cache: CacheConfig, parallel: ParallelConfig) -> None:
    """Raises ConfigError for flags that conflict, or lack another one."""
    _check_tiers(cache, parallel)
    role = kv_role(cache)
    if role != "kv_both" and parallel.prefill_engines:
        raise ConfigError(
            f"--prefill-engines has both roles in one server: omit it, or {role} in --kv-transfer-config"
        )
    if reads_peers(cache):
        _check_nixl(cache, parallel)
    _check_prefill_engines(cache, parallel)


def _check_tiers(cache: CacheConfig, parallel: ParallelConfig) -> None:
    if cache.offloads and not cache.enable_prefix_caching:
        raise ConfigError(
            "--kv-offload-memory, --kv-offload-dir and --kv-offload-remote-url keep blocks for the prefix "
            "cache: omit --no-enable-prefix-caching"
        )
    if (cache.kv_offload_dir is None) != (cache.kv_offload_disk is None):
        raise ConfigError("--kv-offload-dir and --kv-offload-disk go together: give both, or none")
    if cache.kv_offload_shared and cache.kv_offload_dir is None:
        raise ConfigError("--kv-offload-shared finds blocks in a directory: give --kv-offload-dir")
    if cache.kv_offload_dir is not None and parallel.nnodes > 1:
        raise ConfigError(
            "--kv-offload-dir is not supported on several nodes, which have a directory each: use "
            "--kv-offload-memory or --kv-offload-remote-url"
        )
    _check_remote(cache)


def _check_remote(cache: CacheConfig) -> None:
    if (cache.kv_offload_remote_url is None) != (cache.kv_offload_remote is None):
        raise ConfigError("--kv-offload-remote-url and --kv-offload-remote go together: give both, or none")
    if cache.kv_offload_remote_url is None:
        return
    if cache.kv_offload_shared:
        raise ConfigError(
            "--kv-offload-shared is not for two tiers: servers find one another's blocks in "
            "--kv-offload-remote-url; omit it"
        )
    try:
        parse_redis_url(cache.kv_offload_remote_url)
    except ValueError as error:
        raise ConfigError(f"--kv-offload-remote-url: {error}") from None
    if problem := hiredis_problem():
        raise ConfigError(f"--kv-offload-remote-url: {problem}")


def _check_nixl(cache: CacheConfig, parallel: ParallelConfig) -> None:
    flag = "--kv-transfer-config: NixlConnector"
    if not cache.enable_prefix_caching:
        raise ConfigError(f"{flag} gives blocks to the prefix cache: omit --no-enable-prefix-caching")
    if parallel.nnodes > 1:
        raise ConfigError(f"{flag} is not supported on several nodes: use --kv-offload-remote-url")
    check_prompt_transfer(cache, parallel)
    if problem := nixl_problem():
        raise ConfigError(f"{flag}: {problem}")


def _check_prefill_engines(cache: CacheConfig, parallel: ParallelConfig) -> None:
    count = parallel.prefill_engines
    if not count:
        return
    if count >= parallel.data_parallel_size:
        raise ConfigError(
            f"--prefill-engines {count} leaves none of --data-parallel-size {parallel.data_parallel_size} to "
            "generate: lower it, or add engines"
        )
    if cache.kv_offload_dir is None and cache.kv_offload_remote_url is None and not reads_peers(cache):
        raise ConfigError(
            "--prefill-engines needs a tier through which blocks reach the other engines: give "
            "--kv-offload-dir, such as /dev/shm/atom-kv, and --kv-offload-disk, or --kv-offload-remote-url; "
            "or NixlConnector in --kv-transfer-config, which reads them from memory to memory"
        )
    if parallel.lockstep:
        raise ConfigError(
            "--prefill-engines is not supported for engines that share experts, which step together: omit "
            "--enable-expert-parallel"
        )
