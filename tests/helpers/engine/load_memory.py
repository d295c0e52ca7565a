"""The memory that loading needs in addition to the weights.

    python -m tests.helpers.engine.load_memory KIND DIRECTORY MEGABYTES_PER_FILE LAYERS

writes a random checkpoint of that kind (dense, online, experts or mxfp4), loads it in a new process with
and without mapping its files, and prints the resident bytes.
"""

import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import nn
from torch.profiler import ProfilerActivity, profile

from atom.shared.config.online_quantization import online_quantization
from atom_ops import ClampedSwiglu, RoutingRule, backend
from parallel.communicator import Communicator
from workers.layers.causal_lm import CausalLM
from workers.layers.context import BuildContext
from workers.layers.moe.expert_layouts import INTERLEAVED
from workers.layers.moe.moe import MoE, MoEArgs
from workers.layers.quantization.config import resolve
from workers.models.llama import LlamaForCausalLM
from workers.weights.loader import load_directory, weight_bytes
from workers.weights.plan import load_targets

MB = 1 << 20
VOCAB, HIDDEN, FEATURES = 8192, 1024, 768
_DENSE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_KINDS = {
    "experts": MoEArgs(HIDDEN, 16, FEATURES, RoutingRule(2, "softmax")),
    "mxfp4": MoEArgs(
        HIDDEN, 16, FEATURES, RoutingRule(2, "softmax_of_topk"),
        activation=ClampedSwiglu(7.0, 1.702), layout=INTERLEAVED,
    ),
}  # fmt: skip


class ExpertLayers(CausalLM):
    """A model of MoE layers alone."""

    packed_modules_mapping: ClassVar = {}

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        super().__init__(config, build)
        args, count = _KINDS[config["kind"]], config["num_hidden_layers"]
        layers = (MoE(args, build.at(f"layers.{layer}.mlp")) for layer in range(count))
        self.layers = nn.ModuleList(nn.ModuleDict({"mlp": layer}) for layer in layers)

    def forward(self, *args: Any) -> torch.Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def build(kind: str, layers: int, device: str, dtype: torch.dtype = torch.bfloat16) -> CausalLM:
    """A model with uninitialised weights."""
    place = torch.device(device)
    online = online_quantization('{"global_quant_config": "ptpc_fp8"}') if kind == "online" else None
    quantized = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    schemes = resolve(quantized if kind == "mxfp4" else {}, LlamaForCausalLM.packed_modules_mapping, online)
    context = BuildContext(dtype, place, Communicator(), 128, quantization=schemes)
    config = {"kind": kind, "num_hidden_layers": layers}
    return (
        LlamaForCausalLM(_DENSE | config, context)
        if kind in ("dense", "online")
        else ExpertLayers(config, context)
    )


def write(kind: str, layers: int, directory: Path, shard_bytes: int) -> None:
    """Write a random bfloat16 checkpoint, in files of at most `shard_bytes` or of one tensor."""
    tensors = (target.tensor for target in load_targets(build(kind, layers, "meta")))
    shapes = {tensor.name: tensor.shapes[0] for tensor in tensors}
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    files = 0
    for name, shape in shapes.items():
        tensor = _random(name, shape)
        if shard and sum(each.nbytes for each in shard.values()) + tensor.nbytes > shard_bytes:
            files, shard = _close(directory, files, shard, weight_map), {}
        shard[name] = tensor
    _close(directory, files, shard, weight_map)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _random(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if name.endswith(("_blocks", "_scales")):
        return torch.randint(100, 130, shape, dtype=torch.uint8)
    return torch.empty(shape, dtype=torch.bfloat16).uniform_(-1, 1)


def _close(directory: Path, files: int, shard: dict[str, torch.Tensor], weight_map: dict[str, str]) -> int:
    file = f"model-{files:05}.safetensors"
    save_file(shard, directory / file)
    weight_map |= dict.fromkeys(shard, file)
    return files + 1


@dataclass(frozen=True)
class Allocated:
    """Bytes allocated while a model was built and loaded."""

    weights: int
    """Allocated by torch at the end, which is all that the model holds."""
    peak: int
    """The most that torch had allocated or mapped at any time."""
    python_peak: int
    """The most that Python objects and numpy arrays held at any time."""


def allocated(kind: str, layers: int, directory: Path, dtype: torch.dtype) -> Allocated:
    """Build and load the model, counting each allocation of torch's CPU allocator."""
    backend.resolve(torch.device("cpu"))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True):
        pass  # its first use imports thousands of files, which takes many times as long while traced
    tracemalloc.start()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
            model = build(kind, layers, "cpu", dtype)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            load_directory(model, directory, lambda done, total: None)
            python_peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    changes = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = list(accumulate(event.nbytes() for event in sorted(changes, key=lambda event: event.start_ns())))
    assert live[-1] >= weight_bytes(model)
    return Allocated(live[-1], max(live), python_peak)


def measured(kind: str, layers: int, directory: Path, mapped: bool) -> dict[str, int]:
    """The result of `resident`, from a new process."""
    command = [
        sys.executable,
        "-m",
        "tests.helpers.engine.load_memory",
        "load",
        kind,
        str(layers),
        str(directory),
    ]
    environment = os.environ | {"ATOM_DISABLE_MMAP": str(int(not mapped))}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if ran.returncode:
        raise RuntimeError(ran.stderr)
    found: dict[str, int] = json.loads(ran.stdout)
    return found


def resident(kind: str, layers: int, directory: Path) -> dict[str, int]:
    """Bytes of the weights, and the peak of other resident bytes: with and without mapped pages."""
    torch.set_num_threads(1)
    backend.resolve(torch.device("cpu"))
    (Path("/proc/self/clear_refs")).write_text("5")  # resets the peak
    before, own = _status("VmRSS"), _status("RssAnon")
    model = build(kind, layers, "cpu")
    peak_own = 0

    def progress(done: int, total: int) -> None:
        nonlocal peak_own
        peak_own = max(peak_own, _status("RssAnon"))

    load_directory(model, directory, progress)
    weights = weight_bytes(model)
    return {
        "weights": weights,
        "other": _status("VmHWM") - before - weights,
        "other_unmapped": peak_own - own - weights,
    }


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def main() -> None:
    if sys.argv[1] == "load":
        kind, layers, directory = sys.argv[2:5]
        print(json.dumps(resident(kind, int(layers), Path(directory))))
        return
    kind, path, megabytes, count = sys.argv[1:5]
    Path(path).mkdir(parents=True)
    write(kind, int(count), Path(path), int(megabytes) * MB)
    for mapped in (True, False):
        found = measured(kind, int(count), Path(path), mapped)
        figures = ", ".join(f"{name} {value / MB:.0f} MB" for name, value in found.items())
        print(f"{kind}, {'mapped' if mapped else 'not mapped'}: {figures}")


if __name__ == "__main__":
    main()
