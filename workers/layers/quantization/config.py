"""Which scheme stores each matrix of a checkpoint, by its quantization_config.

A quantization method (`quant_method`) is a file named in `METHODS`, whose `rules` turn the config into
patterns and schemes; `resolve` only chooses it. See `rules` for what such a file exports.
"""

import importlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atom.shared.config.online_quantization import OnlineQuantization
from workers.layers.quantization.online import check_patterns, online_rules
from workers.layers.quantization.rules import Rules
from workers.layers.quantization.scheme import PLAIN, Scheme

METHODS = {
    "awq": "awq",
    "compressed-tensors": "compressed_tensors",
    "fbgemm_fp8": "fbgemm",
    "fp8": "fp8",
    "gguf": "gguf",
    "gptq": "gptq",
    "modelopt": "modelopt",
    "mxfp4": "mxfp4",
    "quark": "quark",
}
"""`quant_method` -> its file in this folder."""

ROUTERS = "quantized_routers"
"""Not a setting of any library: the preparation step adds it where the files have quantized routers."""


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """The scheme of every layer."""

    rules: Rules = field(default_factory=lambda: Rules(PLAIN))
    packed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Fused module -> the checkpoint's modules that are stacked into it."""
    online: OnlineQuantization | None = None
    """The settings that `rules` come from; None: the checkpoint's own."""
    routers: bool = False
    """Whether routers follow the rules too, as the checkpoint's tensors say; else they are plain."""
    asked: dict[str, str] = field(default_factory=dict)
    """If `online`: path of each module whose scheme was asked for -> of the module that it is fused into."""

    def linear(self, path: str) -> Scheme:
        """The scheme of the linear layer at `path`. Raises ValueError if fused modules differ."""
        found = self._common(path, self._modules(path))
        return found if found.linear else PLAIN

    def router(self, path: str) -> Scheme:
        """The scheme of the router at `path`."""
        return self.linear(path) if self.routers else PLAIN

    def vocabulary(self, path: str) -> Scheme:
        """The scheme of the embedding or of the LM head at `path`."""
        return self.rules.scheme(path) if self.rules.with_vocabulary else PLAIN

    def parts(self, path: str) -> list[Scheme]:
        """The scheme of each of the checkpoint's modules that are fused into the linear layer at `path`."""
        schemes = (self._scheme(module, path) for module in self._modules(path))
        return [scheme if scheme.linear else PLAIN for scheme in schemes]

    def _modules(self, path: str) -> list[str]:
        """The checkpoint's modules that are fused into the linear layer at `path`."""
        parent, _, last = path.rpartition(".")
        return [f"{parent}.{part}" if parent else part for part in self.packed.get(last, (last,))]

    def experts(self, path: str, matrices: Sequence[str], count: int = 1) -> tuple[Scheme, Scheme]:
        """The schemes of the routed experts at `path`: of gate and up, and of down, whose name is the last.

        `matrices` are the names of one expert's; those that begin with 0. are of expert 0, one of `count`.
        Raises ValueError if the experts have different schemes, or a matrix one that does not mix.
        """
        *gate_up, down = (self._of_experts(path, matrix, count) for matrix in matrices)
        schemes = [self._common(path, [module for group in gate_up for module in group])]
        schemes.append(self._common(path, down))
        if schemes[0] is not schemes[1] and not all(scheme.mixes for scheme in schemes):
            self._common(path, [*(module for group in gate_up for module in group), *down])
        return schemes[0], schemes[1]

    def _of_experts(self, path: str, matrix: str, count: int) -> list[str]:
        """The modules of the checkpoint that hold one matrix of all experts."""
        if not matrix.startswith("0.") or not self.rules.siblings.differ(path):
            return [f"{path}.{matrix}"]
        return [f"{path}.{expert}.{matrix.removeprefix('0.')}" for expert in range(count)]

    def _common(self, path: str, modules: Sequence[str]) -> Scheme:
        """The scheme that all these modules of the checkpoint have, which are stacked into `path`."""
        found = {module: self._scheme(module, path) for module in modules}
        if len({id(scheme) for scheme in found.values()}) > 1:
            names = Counter(scheme.name for scheme in found.values()).most_common()
            rare = next(module for module, scheme in found.items() if scheme.name == names[-1][0])
            source = "quantization_config" if self.online is None else "--online-quant-config"
            raise ValueError(
                f"{source} has different formats for modules that are fused into {path}, which "
                f"is not supported: {rare}: {names[-1][0]}, others: {names[0][0]}"
            )
        return next(iter(found.values()))

    def _scheme(self, module: str, fused: str) -> Scheme:
        """The scheme by the module's path, or by that of the module that it is fused into."""
        if self.online is not None:
            self.asked[module] = fused
        return self.rules.scheme(module, fused)

    def check_patterns(self, modules: Iterable[str]) -> None:
        """Raise ValueError if a pattern of --online-quant-config does nothing; call it with a built model.

        `modules` are the paths of all modules, which an exclusion may name though they are always plain.
        """
        if self.online is not None:
            check_patterns(self.online, self.rules, self.asked, modules)


def resolve(
    config: Mapping[str, Any],
    packed: Mapping[str, Sequence[str]] | None = None,
    online: OnlineQuantization | None = None,
) -> QuantizationConfig:
    """The schemes for a model with this config.json, or to which a plain one is quantized `online`.

    Raises ValueError for a format that cannot run, and for a quantized checkpoint with `online`.
    """
    stated = config.get("quantization_config")
    if stated is None or stated == {}:
        rules = Rules(PLAIN) if online is None else online_rules(online)
        return QuantizationConfig(rules, packed or {}, online)
    if online is not None:
        method = stated.get("quant_method", "unknown") if isinstance(stated, dict) else stated
        raise ValueError(
            f"--online-quant-config quantizes plain checkpoints, and this one is quantized ({method!s:.40}): "
            "omit the flag"
        )
    if not isinstance(stated, dict):
        raise ValueError(f"quantized, but quantization_config is not an object: {stated!r:.40}")
    rules = _rules(stated, config.get("model_type"))
    return QuantizationConfig(rules, packed or {}, routers=stated.get(ROUTERS) is True)


def _rules(stated: Mapping[str, Any], model_type: str | None) -> Rules:
    method = stated.get("quant_method", "unknown")
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(
            f"quantized ({method}): not supported, use a plain checkpoint, one in {', '.join(METHODS)}, or a "
            ".gguf"
        )
    try:
        found: Rules = importlib.import_module(f"{__package__}.{METHODS[method]}").rules(stated)
    except ValueError as error:
        raise ValueError(
            f"quantized ({method}) with {error}: not supported, use a plain checkpoint"
        ) from None
    for scheme in found.schemes:
        if scheme.families and model_type not in scheme.families:
            only = ", ".join(scheme.families)
            raise ValueError(f"quantized ({method}): supported for model type {only}, use a plain checkpoint")
    return found
