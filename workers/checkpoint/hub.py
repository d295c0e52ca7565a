"""Downloads checkpoints from a Hugging Face hub into the local cache.

HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE and the library's other variables apply.
Cached files are not downloaded again, and are used when the hub cannot be reached.
"""

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workers.checkpoint.chat_templates import V4_ENCODER
from workers.checkpoint.gguf_files import VISION, first_files, of_quantization, part_names

# (phase, done, total)
Report = Callable[[str, int, int], None]
Accept = Callable[[Path], None]
"""Raises ValueError for a directory whose config.json describes an unsupported model."""

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Weights in other formats, which may be many gigabytes, are not downloaded.
_TEMPLATES = "*.jinja"
_FILES = ["*.json", "tokenizer.model", "spiece.model", "tiktoken.model", "vocab.txt", "merges.txt"]
_WEIGHTS = ["*.safetensors"]
_CONFIG = "config.json"
# Copies in other formats: onnx/, original/, …, and that of Mistral. Only templates have their own folder.
_IGNORED = [*(f"*/{pattern}" for pattern in _FILES + _WEIGHTS), "consolidated*.safetensors"]
# Read when the library is imported. Timeouts in seconds; we display the progress ourselves.
_LIBRARY_DEFAULTS = {
    "HF_HUB_ETAG_TIMEOUT": "5",
    "HF_HUB_DOWNLOAD_TIMEOUT": "5",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
_BYTES_BAR = "huggingface_hub.snapshot_download"


class HubError(ValueError):
    """The hub has no such model for this user. One line that says what to do."""


class UnreachableError(OSError):
    """The hub cannot be reached, and the model is not in the cache. One line."""


def is_hub_name(model: str) -> bool:
    """Whether `model` looks like owner/name, like owner/name:file.gguf or like owner/name:Q4_K_M."""
    return _NAME.fullmatch(model.partition(":")[0]) is not None


def fetch(
    model: str,
    revision: str | None,
    cache_dir: str | None,
    report: Report,
    accept: Accept,
    weights: bool = True,
) -> Path:
    """Download `model`; returns its directory or (first) GGUF file. `cache_dir` None is the library's cache.

    `accept` is called with a directory that has config.json before anything else is downloaded.
    Without `weights` safetensors files are not downloaded.
    Raises HubError, UnreachableError, OSError, and what `accept` raises.
    """
    for name, value in _LIBRARY_DEFAULTS.items():
        os.environ.setdefault(name, value)
    from huggingface_hub import snapshot_download

    repository, _, file = model.partition(":")
    reason = _why_unreachable(repository, revision)
    options: dict[str, Any] = {"revision": revision, "cache_dir": cache_dir}
    options["local_files_only"] = reason is not None
    with _errors_in_one_line(repository, revision, reason):
        if file and not file.lower().endswith(".gguf"):
            file = _file_of_quantization(repository, file, options)
        files = part_names(file) if file else []
        options["allow_patterns"] = files or [_TEMPLATES, V4_ENCODER, *_FILES, *_WEIGHTS * weights]
        if not files:
            options["ignore_patterns"] = _IGNORED
            _fetch_config(repository, revision, options, accept)
        progress = _Progress(f"Downloading {repository}", _bytes_to_fetch(repository, options), report)
        directory = Path(snapshot_download(repository, tqdm_class=progress.bar_class(), **options))
        progress.finish()
        if missing := [name for name in files if not (directory / name).is_file()]:
            raise HubError(f"{repository} has no file {missing[0]}: {_gguf_files(repository, revision)}")
    return directory / file if file else directory


def _file_of_quantization(repository: str, tag: str, options: Mapping[str, Any]) -> str:
    """The (first) GGUF file of the quantization `tag`. Raises HubError unless it has one model."""
    from huggingface_hub import HfApi, snapshot_download

    if options["local_files_only"]:
        # The library refuses patterns that have files which are not cached.
        patterns = [f"*{each}*.gguf" for each in (tag, tag.upper(), tag.lower())]
        cached: dict[str, Any] = {**options, "allow_patterns": patterns, "ignore_patterns": [f"*{VISION}*"]}
        directory = Path(snapshot_download(repository, **cached))
        names = [path.relative_to(directory).as_posix() for path in directory.rglob("*.gguf")]
    else:
        names = HfApi().list_repo_files(repository, revision=options["revision"])
    found = of_quantization(names, tag)
    if len(found) == 1:
        return found[0]
    if found:
        raise HubError(f"{repository} has several GGUF models {tag}: name one, of {', '.join(found)}")
    raise HubError(f"{repository} has no GGUF model {tag}: {_name_one(repository, names)}")


def _fetch_config(repository: str, revision: str | None, options: dict[str, Any], accept: Accept) -> None:
    """Download config.json alone and check it, before gigabytes of weights are downloaded."""
    from huggingface_hub import snapshot_download

    directory = Path(snapshot_download(repository, **options | {"allow_patterns": [_CONFIG]}))
    if not (directory / _CONFIG).is_file():
        raise HubError(f"{repository} has no {_CONFIG}: {_gguf_files(repository, revision)}")
    accept(directory)


def _why_unreachable(repository: str, revision: str | None) -> Exception | None:
    """Why the hub cannot be reached; None if it responds, even with an error.

    Checked first, because the library's own request has no timeout.
    """
    from huggingface_hub import HfApi, constants, errors

    try:
        HfApi().model_info(repository, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except errors.HfHubHTTPError:
        return None
    except errors.HFValidationError as error:
        raise HubError(f"--model {repository}: {_first_line(error)}") from None
    except Exception as error:
        if isinstance(error, OSError) or _is_http_library_error(error):
            return error
        raise
    return None


def _bytes_to_fetch(repository: str, options: dict[str, Any]) -> int:
    """Bytes to download; 0 if only the cache can be used."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError

    if options["local_files_only"]:
        return 0
    try:
        files = snapshot_download(repository, dry_run=True, **options)
    except DryRunError:
        return 0
    return sum(file.file_size for file in files if file.will_download)


def _gguf_files(repository: str, revision: str | None) -> str:
    from huggingface_hub import HfApi

    return _name_one(repository, HfApi().list_repo_files(repository, revision=revision))


def _name_one(repository: str, names: Iterable[str]) -> str:
    found = first_files(names)
    if not found:
        return "give a model with config.json and safetensors files"
    return f"name one of its GGUF files, such as --model {repository}:{found[0]}"


@contextmanager
def _errors_in_one_line(repository: str, revision: str | None, reason: Exception | None) -> Iterator[None]:
    from huggingface_hub import constants, errors

    try:
        yield
    except errors.GatedRepoError:
        raise HubError(
            f"{repository} is gated: accept its terms at {constants.ENDPOINT}/{repository}, "
            "and set HF_TOKEN to a token of that account"
        ) from None
    except errors.RepositoryNotFoundError:
        raise HubError(
            f"--model {repository}: no such path, and {constants.ENDPOINT} has no such model, or it is "
            "private; check the name, or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise HubError(f"{repository} has no revision {revision}: check --revision") from None
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError) as error:
        raise _unreachable(repository, reason or error.__cause__ or error) from None
    except Exception as error:
        if isinstance(error, OSError | HubError) or not _is_http_library_error(error):
            raise
        raise UnreachableError(
            f"the download of {repository} failed ({_with_type(error)}): start again to continue it"
        ) from None


def _unreachable(repository: str, cause: BaseException) -> UnreachableError:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return UnreachableError(
            f"--model {repository}: no such path, not in the cache {constants.HF_HUB_CACHE}, and "
            "HF_HUB_OFFLINE forbids downloading it"
        )
    return UnreachableError(
        f"--model {repository}: no such path, not in the cache, and {constants.ENDPOINT} cannot be reached "
        f"({_with_type(cause)}); give a local directory, or check the network"
    )


def _is_http_library_error(error: Exception) -> bool:
    return type(error).__module__.startswith("httpx")


def _with_type(error: BaseException) -> str:
    return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


class _Progress:
    """Sums the progress of the library's download threads."""

    def __init__(self, phase: str, total: int, report: Report):
        self._phase = phase
        self._total = total
        self._report = report
        self._done = 0
        self._lock = threading.Lock()

    def add(self, size: int) -> None:
        """`size` more bytes were downloaded."""
        with self._lock:
            # `finish` reports the last byte: until then files are still being moved into place.
            self._done = min(self._done + size, self._total - 1)
            if self._done > 0:
                self._report(self._phase, self._done, self._total)

    def finish(self) -> None:
        if self._total:
            self._report(self._phase, self._total, self._total)

    def bar_class(self) -> type[Any]:
        """A progress bar class for the library that displays nothing."""
        from huggingface_hub.utils.tqdm import tqdm  # the library passes names only to subclasses

        progress = self

        class Bar(tqdm):
            def __init__(self, *args: Any, **options: Any):
                self._counts = options.get("name") == _BYTES_BAR
                super().__init__(*args, **options | {"disable": True})

            def update(self, n: float | None = 1) -> None:
                if self._counts and n:
                    progress.add(int(n))

        return Bar
