"""Resolves `--model` and `--draft-model` to local files and checks them, before the engine starts.

Prints one line of JSON on standard output: {"checkpoint": …, "device": …, "draft_model": …} (a Checkpoint,
the host's DeviceCapabilities and a directory), or {"error": "one line"} with a nonzero exit status. The heavy
libraries are imported only in this process, and only if the checkpoint needs them.
"""

import contextlib
import errno
import hashlib
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.fields import json_object
from atom.shared.config.images import image_limit
from atom.shared.config.model import ModelConfig
from atom.shared.config.speculative import SpeculativeConfig
from atom.shared.messages.launch import PrepareLaunch
from atom.shared.utils import envs
from atom.shared.utils.errors import disk_full, one_line, out_of_memory
from atom.shared.utils.exit_status import ExitStatus
from atom.shared.utils.file_lock import exclusive
from atom.shared.utils.process import read_launch
from atom.shared.utils.trusted_path import REMEDY, distrusted
from workers.checkpoint.checkpoint_files import check_weights, tensors_by_file
from workers.checkpoint.draft import draft_checkpoint
from workers.checkpoint.families import check_supported
from workers.checkpoint.gguf_files import gguf_in_directory, gguf_parts
from workers.checkpoint.gguf_size import check_gguf_size
from workers.checkpoint.head import with_own_head
from workers.checkpoint.hf_config import read_config
from workers.checkpoint.hf_directory import read_directory
from workers.checkpoint.hub import Accept, HubError, UnreachableError, fetch, is_hub_name
from workers.checkpoint.quantization_files import with_routers
from workers.device_probe import probe

# To be increased when workers.weights.gguf changes its output, so that older conversions are not used.
_GGUF_FORMAT = 8

_CONVERSION_DEADLINE_S = 3600.0
_PROGRESS_LINGER_MS = 1000

# Errors of the host, not of the checkpoint: a later start may succeed.
_HOST_ERRORS = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EROFS)

# (phase, done, total)
Report = Callable[[str, int, int], None]


def main() -> None:
    """Entry point of `python -m workers.checkpoint.prepare`."""
    launch = read_launch(PrepareLaunch)
    status = ExitStatus.DONE
    result = dict[str, object]()
    try:
        with progress_reports(launch.supervisor) as report:
            checkpoint = prepare(launch.config, Path(launch.cache_dir), report)
            draft = prepare_draft(launch.speculative, launch.config, checkpoint, report)
        result = {"checkpoint": checkpoint, "device": probe(), "draft_model": draft}
    except Exception as error:
        if envs.ATOM_LOG_MORE:
            traceback.print_exc()
        cache_dir = Path(launch.cache_dir)
        unusable = _full_disk(error, launch.config, cache_dir) or _unusable_cache(error, cache_dir)
        status = ExitStatus.RESOURCES if unusable else _status(error)
        result = {"error": unusable or _reason(launch.config.model, error)}
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    sys.exit(status)


def prepare(config: ModelConfig, cache_dir: Path, report: Report) -> Checkpoint:
    """Describe the checkpoint that `config` names; downloads it or converts a GGUF file first.

    Raises ValueError, in one line, for an unsupported checkpoint; OSError for an error of the host.
    """
    overrides = json_object(config.hf_overrides or "{}")
    directory = _directory(config, cache_dir, report, lambda found: _check_supported(found, overrides))
    if not (directory / "config.json").exists():
        raise ValueError(
            f"{directory} has no config.json: give a Hugging Face checkpoint's directory, or a .gguf file"
        )
    _check_supported(directory, overrides)
    checkpoint = read_directory(directory, cache_dir, overrides, config.dtype)
    if image_limit(config.limit_mm_per_prompt) == 0 and checkpoint.images is not None:
        checkpoint = replace(checkpoint, images=None, no_images="--limit-mm-per-prompt allows none")
    if config.load_dummy:
        return checkpoint
    check_weights(directory)
    tensors = (name for names in tensors_by_file(directory).values() for name in names)
    return with_own_head(replace(checkpoint, hf_config=with_routers(checkpoint.hf_config, tensors)))


def prepare_draft(
    speculative: SpeculativeConfig, config: ModelConfig, target: Checkpoint, report: Report
) -> str | None:
    """The directory of --draft-model, which is downloaded first; None for a method without one.

    Raises as `draft_checkpoint` and `fetch` do.
    """
    name = speculative.draft_model
    if name is None or not speculative.has_draft_model:
        return None

    def check(directory: Path, has_weights: bool) -> None:
        draft_checkpoint(replace(speculative, draft_model=str(directory)), target, not has_weights)

    path = Path(name).expanduser().resolve()
    weights = not config.load_dummy
    if not path.exists() and is_hub_name(name):
        path = fetch(name, None, config.download_dir, report, lambda found: check(found, False), weights)
    check(path, weights)
    return str(path)


def _check_supported(directory: Path, overrides: Mapping[str, Any]) -> None:
    config = read_config(directory, overrides)
    check_supported(config["architectures"][0], config.get("model_type"), own_code="auto_map" in config)


def _directory(config: ModelConfig, cache_dir: Path, report: Report, accept: Accept) -> Path:
    """The Hugging Face directory of the model; a download calls `accept` before it loads weights."""
    model = config.model
    path = Path(model).expanduser().resolve()
    if not path.exists():
        if not is_hub_name(model):
            raise ValueError(
                f"--model {model}: no such path; give a directory with config.json and safetensors files, "
                "a .gguf file, or a name on the hub such as Qwen/Qwen3-0.6B"
            )
        weights = not config.load_dummy
        path = fetch(model, config.revision, config.download_dir, report, accept, weights)
    if path.is_dir():
        found = None if (path / "config.json").exists() else gguf_in_directory(path)
        return path if found is None else converted_gguf(found, cache_dir, report)
    if path.suffix.lower() != ".gguf":
        raise ValueError(f"{model} is a file, but not a .gguf file; give one or a directory with config.json")
    return converted_gguf(path, cache_dir, report)


def converted_gguf(path: Path, cache_dir: Path, report: Report) -> Path:
    """The directory with the GGUF model's content in Hugging Face form; converted only once.

    `path` is its file, or the first of several. A second process waits for the first. A directory gets its
    final name only when it is complete. Raises ValueError if other users can write there.
    """
    parts = gguf_parts(path)
    stats = [(part.name, part.stat()) for part in parts]
    files = [(name, status.st_size, status.st_mtime_ns) for name, status in stats]
    key = repr((str(path), files, _GGUF_FORMAT))
    name = f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    parent = cache_dir / "gguf"
    final = parent / name
    parent.mkdir(parents=True, exist_ok=True)
    if problem := distrusted(final):
        raise ValueError(f"{path.name} is converted into {parent}, but {problem}: {REMEDY}")
    if final.exists():
        return final
    for part in parts:
        check_gguf_size(part)
    waiting = f"Waiting for another start to convert {path.name}"
    with exclusive(parent / f"{name}.lock", _CONVERSION_DEADLINE_S, lambda: report(waiting, 0, 1)):
        if not final.exists():
            _convert(path, parent / f"{name}.partial", report)
            (parent / f"{name}.partial").replace(final)
    return final


def _convert(path: Path, directory: Path, report: Report) -> None:
    from workers.weights.gguf import convert

    shutil.rmtree(directory, ignore_errors=True)  # left by a killed conversion
    directory.mkdir()
    try:
        convert(path, directory, report)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


@contextlib.contextmanager
def progress_reports(supervisor: str) -> Iterator[Report]:
    """A function that sends Progress to the supervisor; does nothing if the endpoint is empty."""
    if not supervisor:
        yield lambda phase, done, total: None
        return
    import zmq

    from atom.shared.messages.codec import encode
    from atom.shared.messages.supervisor import Progress

    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.setsockopt(zmq.LINGER, _PROGRESS_LINGER_MS)
        socket.connect(supervisor)

        def report(phase: str, done: int, total: int) -> None:
            # Progress is dropped rather than waiting for a busy supervisor.
            with contextlib.suppress(zmq.Again):
                socket.send(encode(Progress("prepare", phase, done, total)), zmq.NOBLOCK)

        yield report


def _status(error: Exception) -> ExitStatus:
    host_error = isinstance(error, UnreachableError) or out_of_memory(error)
    if host_error or (isinstance(error, OSError) and error.errno in _HOST_ERRORS):
        return ExitStatus.RESOURCES
    return ExitStatus.MODEL if isinstance(error, ValueError | OSError) else ExitStatus.FAILURE


def _reason(model: str, error: Exception) -> str:
    """The error on one line; unexpected errors with the name of their type."""
    if type(error) in (ValueError, HubError, UnreachableError):
        return one_line(error, type(error))
    if isinstance(error, OSError) and error.strerror:
        file = f" ({error.filename})" if error.filename else ""
        return f"cannot prepare {model}: {error.strerror}{file}{_remedy(error)}"
    return f"cannot prepare {model}: {out_of_memory(error) or one_line(error)}"


def _full_disk(error: Exception, config: ModelConfig, cache_dir: Path) -> str:
    """One line for a lack of disk space, with what is written where; else empty."""
    if not disk_full(error):
        return ""
    file = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
    is_local = Path(config.model).expanduser().exists()
    hub = "" if is_local else "; downloads are moved by --download-dir or HF_HOME"
    return (
        f"cannot prepare {config.model}: no space is left on the disk{file}: free some, or set "
        f"ATOM_CACHE_DIR ({cache_dir}) to a directory on another one{hub}"
    )


def _unusable_cache(error: Exception, cache_dir: Path) -> str:
    """One line for an error in creating the cache directory, also where HOME is unusable; else empty."""
    if not isinstance(error, OSError) or not error.filename:
        return ""
    path = Path(error.filename)
    if path == Path("/") or not (cache_dir.is_relative_to(path) or path.is_relative_to(cache_dir)):
        return ""
    return (
        f"cannot write to {path}: {error.strerror}; set ATOM_CACHE_DIR to a writable directory "
        "(and HF_HOME, for models of the hub)"
    )


def _remedy(error: OSError) -> str:
    if error.errno in (errno.EACCES, errno.EPERM):
        return ": give this user permission to read it"
    return ""


if __name__ == "__main__":
    main()
