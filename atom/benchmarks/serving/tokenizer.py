"""The client's tokenizer: measures prompts and makes prompts of a given length."""

import contextlib
import json
from pathlib import Path
from typing import Any

from atom.benchmarks.serving.errors import BenchmarkError
from atom.shared.utils import envs

__all__ = ["MODES", "PromptTokenizer", "has_tokenizer", "load_tokenizer", "vocabulary_size"]

MODES = ("auto", "slow", "mistral", "custom")
_FILE_STARTS = ("tokenizer", "tokenization", "vocab", "tekken", "spiece", "sentencepiece")
_FILE_ENDS = (".model", ".tiktoken")


class PromptTokenizer:
    """A Hugging Face tokenizer that never adds special tokens."""

    def __init__(self, backend: Any, name: str):
        self._backend = backend
        self.name = name
        self.vocab_size = len(backend)
        self.special_ids = frozenset(backend.all_special_ids)

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text."""
        if not texts:
            return []
        encoded = self._backend(texts, add_special_tokens=False, verbose=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def encode(self, text: str) -> list[int]:
        """The ids of one text."""
        return self.encode_all([text])[0]

    def decode_all(self, ids: list[list[int]]) -> list[str]:
        """The text of each list of ids."""
        return [self._backend.decode(one, clean_up_tokenization_spaces=False) for one in ids]

    def as_chat(self, text: str) -> str:
        """The chat template applied to one user message.

        Raises BenchmarkError if there is no template.
        """
        message = [{"role": "user", "content": text}]
        try:
            rendered: str = self._backend.apply_chat_template(
                message, add_generation_prompt=True, tokenize=False
            )
        except ValueError:
            raise BenchmarkError(
                f"{self.name} has no chat template: use --backend openai-chat, or another --tokenizer"
            ) from None
        return rendered


def load_tokenizer(name: str, mode: str = "auto", trust_remote_code: bool = False) -> PromptTokenizer:
    """From a directory, a .gguf file or a hub name. Raises BenchmarkError."""
    if mode == "custom" and not trust_remote_code:
        raise BenchmarkError(
            "--tokenizer-mode custom runs the model's own code: it needs --trust-remote-code"
        )
    try:
        backend = _mistral(name) if mode == "mistral" else _auto(name, mode, trust_remote_code)
    # A tokenizer's own code can raise anything.
    except Exception as error:
        if isinstance(error, BenchmarkError):
            raise
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BenchmarkError(f"no tokenizer in {name}: {first}") from error
    return PromptTokenizer(backend, name)


def has_tokenizer(model: str) -> bool:
    """Whether `model` has a tokenizer; False only for a directory without tokenizer files."""
    directory = Path(model)
    if not directory.is_dir():
        return True
    # For such a directory transformers would make an empty tokenizer.
    names = [path.name for path in directory.iterdir()]
    return any(name.startswith(_FILE_STARTS) or name.endswith(_FILE_ENDS) for name in names)


def vocabulary_size(model: str) -> int | None:
    """`vocab_size` of config.json; None without that file or entry."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
        return size if isinstance(size, int) else None
    return None


def _auto(name: str, mode: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "use_fast": mode != "slow"}
    path = Path(name)
    if path.suffix == ".gguf" and path.is_file():
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, **options)
    if not path.exists() and envs.VLLM_USE_MODELSCOPE:
        name = _from_modelscope(name)
    return AutoTokenizer.from_pretrained(name, **options)


def _mistral(name: str) -> Any:
    try:
        import mistral_common  # noqa: F401
    except ModuleNotFoundError:
        raise BenchmarkError(
            "--tokenizer-mode mistral needs the package mistral-common: pip install mistral-common"
        ) from None
    from transformers import MistralCommonBackend

    return MistralCommonBackend.from_pretrained(name)


def _from_modelscope(name: str) -> str:
    """The directory of ModelScope's download, without weights."""
    try:
        from modelscope import snapshot_download
    except ModuleNotFoundError:
        raise BenchmarkError(
            "VLLM_USE_MODELSCOPE needs the package modelscope: unset it, or install it"
        ) from None
    weights = ["*.safetensors", "*.bin", "*.pt", "*.gguf", "*.h5", "*.msgpack"]
    directory: str = snapshot_download(model_id=name, ignore_file_pattern=weights)
    return directory
