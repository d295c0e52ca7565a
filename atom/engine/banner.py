"""What a server prints once it is ready: what it serves, with what, and a request to try."""

import json
import os
import shlex
from collections.abc import Mapping

from atom.shared.config.cache import CacheConfig
from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.engine import EngineConfig
from atom.shared.config.server import ServerConfig
from atom.shared.config.speculative import SpeculativeConfig
from atom.shared.utils.version import atom_version

__all__ = ["banner"]


def banner(
    config: EngineConfig,
    server: ServerConfig,
    checkpoint: Checkpoint,
    details: Mapping[str, int | str],
    url: str,
    admin: str | None,
    seconds: float,
) -> list[str]:
    """The lines. `details` are of an engine that is ready, `admin` is the address of the administration."""
    name = config.model.names[0]
    each = " in each engine" if config.parallel.data_parallel_size > 1 else ""
    changes = config.model.hf_overrides
    rows = (
        ("model", f"{name} ({config.model.dtype})"),
        ("overrides", changes if changes not in (None, "{}") else ""),
        ("layout", config.parallel.layout(config.device.device)),
        ("prompts", f"on {first} of the engines" if (first := config.parallel.prefill_engines) else ""),
        ("frontends", str(server.api_server_count) if server.api_server_count > 1 else ""),
        (
            "KV cache",
            f"{details.get('kv_tokens', 0):,} tokens{each} ({_kv_dtype(config)}), "
            f"at most {details.get('max_model_len', 0):,} a request",
        ),
        ("KV tiers", _kv_tiers(config.cache)),
        (
            "batch",
            f"{config.scheduler.max_num_seqs} requests{each}, "
            f"{config.scheduler.max_num_batched_tokens} tokens a step",
        ),
        ("drafts", _drafts(config.speculative)),
        ("admin", admin or ""),
        ("ready", f"after {seconds:.1f} s at {url}"),
    )
    return [
        f"ATOM {atom_version()}",
        *(f"  {label:<9} {text}" for label, text in rows if text),
        "  try it:",
        f"  {_curl(url, name, checkpoint, server.api_key)}",
    ]


def _kv_dtype(config: EngineConfig) -> str:
    return config.model.dtype if config.cache.kv_cache_dtype == "auto" else config.cache.kv_cache_dtype


def _kv_tiers(cache: CacheConfig) -> str:
    """Where blocks go that leave the KV cache; empty: nowhere."""
    tiers = (
        (cache.kv_offload_memory, "of memory"),
        (cache.kv_offload_disk, f"of files in {cache.kv_offload_dir}"),
        (cache.kv_offload_remote, "of a remote store"),
    )
    return ", ".join(f"{size / 2**30:.4g} GiB {where}" for size, where in tiers if size)


def _drafts(speculative: SpeculativeConfig) -> str:
    """What drafts tokens, and how many; empty: nothing."""
    if speculative.method is None:
        return ""
    text = f"{speculative.method}, at most {speculative.num_speculative_tokens} a step"
    if (forced := speculative.forced_length) is not None:
        text += f"; forced: {forced:g} tokens a step, text is not the model's"
    return text


def _curl(url: str, model: str, checkpoint: Checkpoint, keys: str | None) -> str:
    """A command that this model answers: chat, text without a template, ids without a tokenizer."""
    body: dict[str, object] = {"model": model}
    if checkpoint.chat_template_file is not None and checkpoint.tokenizer_file is not None:
        path = "chat/completions"
        body["messages"] = [{"role": "user", "content": "Hello!"}]
    else:
        path = "completions"
        body["prompt"] = "Once upon a time" if checkpoint.tokenizer_file else [1, 2, 3]
        body["max_tokens"] = 32
    headers = ["Content-Type: application/json"]
    if keys is not None:
        # The variable may have several keys, any of which will do; keys of a flag are not shown again.
        is_set = os.environ.get("ATOM_API_KEY") == keys
        headers.append(f"Authorization: Bearer {'${ATOM_API_KEY%%,*}' if is_set else 'YOUR_KEY'}")
    flags = " ".join(f'-H "{header}"' for header in headers)
    data = shlex.quote(json.dumps(body, ensure_ascii=False))
    return f"curl {url}/v1/{path} {flags} -d {data}"
