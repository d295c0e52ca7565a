"""Which scheme stores each matrix of a checkpoint, by `quantization_config` of config.json."""

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from workers.layers.quantization.scheme import PLAIN, Scheme

FORMATS = {"fp8": "fp8", "mxfp4": "mxfp4"}
"""`quant_method` -> its file in this folder."""
_EXCLUSIONS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude")
_REGEX = "re:"


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """The scheme of every layer."""

    default: Scheme = PLAIN
    rules: tuple[tuple[str, Scheme], ...] = ()
    """(pattern of a module path, its scheme); the first that matches applies, before the default.

    A pattern is a path or a part of one, as mlp.gate (then it also covers the modules inside), a glob,
    or a regular expression after re:, matched from the start.
    """
    packed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Fused module -> the checkpoint's modules that are stacked into it."""

    def linear(self, path: str) -> Scheme:
        """The scheme of the linear layer at `path`. Raises ValueError if fused modules differ."""
        if not self.default.linear:
            return PLAIN
        parent, _, last = path.rpartition(".")
        parts = self.packed.get(last, (last,))
        return self._common(path, [f"{parent}.{part}" if parent else part for part in parts])

    def experts(self, path: str, matrices: Sequence[str]) -> Scheme:
        """The scheme of the routed experts at `path`; `matrices` are the names of one expert's.

        Raises ValueError if the experts have different ones.
        """
        inside = [pattern for pattern, _ in self.rules if pattern.startswith(f"{path}.")]
        if inside:
            raise ValueError(
                f"quantization_config excludes {inside[0]} and not all of {path}: experts that are stored in "
                "different formats are not supported"
            )
        return self._common(path, [f"{path}.{matrix}" for matrix in matrices])

    def _common(self, path: str, modules: Sequence[str]) -> Scheme:
        """The scheme that all these modules of the checkpoint have, which are stacked into `path`."""
        found = {module: self._scheme(module) for module in modules}
        if len(set(map(id, found.values()))) > 1:
            each = ", ".join(f"{module}: {scheme.name}" for module, scheme in found.items())
            raise ValueError(
                f"quantization_config has different formats for modules that are fused into {path}, which "
                f"is not supported: {each}"
            )
        return next(iter(found.values()))

    def _scheme(self, module: str) -> Scheme:
        return next((scheme for pattern, scheme in self.rules if _matches(pattern, module)), self.default)


def resolve(
    config: Mapping[str, Any], packed: Mapping[str, Sequence[str]] | None = None
) -> QuantizationConfig:
    """The schemes for a model with this config.json. Raises ValueError for a format that cannot run."""
    stated = config.get("quantization_config")
    if stated is None or stated == {}:
        return QuantizationConfig()
    if not isinstance(stated, dict):
        raise ValueError(f"quantized, but quantization_config is not an object: {stated!r:.40}")
    scheme = _scheme(stated, config.get("model_type"))
    return QuantizationConfig(scheme, tuple((pattern, PLAIN) for pattern in _excluded(stated)), packed or {})


def _excluded(stated: Mapping[str, Any]) -> list[str]:
    """The patterns of modules that are not quantized."""
    found: list[str] = []
    for name in _EXCLUSIONS:
        patterns = stated.get(name) or []
        if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
            raise ValueError(f"quantized, but {name} is not a list of module names: {patterns!r:.40}")
        found += patterns
    for pattern in found:
        try:
            re.compile(pattern.removeprefix(_REGEX) if pattern.startswith(_REGEX) else "")
        except re.error as error:
            raise ValueError(
                f"quantized, but {pattern!r:.80} is not a regular expression for modules: {error}"
            ) from None
    return found


def _scheme(stated: Mapping[str, Any], model_type: str | None) -> Scheme:
    method = stated.get("quant_method", "unknown")
    known = ", ".join(FORMATS)
    if not isinstance(method, str) or method not in FORMATS:
        raise ValueError(
            f"quantized ({method}): not supported, use a plain checkpoint, one in {known}, or a .gguf"
        )
    try:
        found: Scheme = importlib.import_module(f"{__package__}.{FORMATS[method]}").scheme(stated)
    except ValueError as error:
        raise ValueError(
            f"quantized ({method}) with {error}: not supported, use a plain checkpoint"
        ) from None
    if found.families and model_type not in found.families:
        only = ", ".join(found.families)
        raise ValueError(f"quantized ({method}): supported for model type {only}, use a plain checkpoint")
    return found


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith(_REGEX):
        return re.match(pattern.removeprefix(_REGEX), module) is not None
    if any(character in pattern for character in "*?["):
        return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")
    return f".{pattern}." in f".{module}."
