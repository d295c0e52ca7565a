"""How much memory loading takes beside the weights.

    python -m tests.helpers.load_memory {dense,experts,packed} DIRECTORY MEGABYTES_PER_FILE LAYERS

writes a random checkpoint of that kind and loads it in a process of its own, with and without
mapping its files, and prints the figures of both.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import nn

from atom_ops import ClampedSwiglu, RoutingRule, backend
from parallel.communicator import Communicator
from parallel.state import TPGroup
from workers.layers.causal_lm import CausalLM
from workers.layers.context import BuildContext
from workers.layers.expert_layouts import InterleavedMXFP4
from workers.layers.moe import MoE, MoEArgs
from workers.models.llama import LlamaForCausalLM
from workers.weights.loader import load_weights, weight_bytes
from workers.weights.plan import load_targets

MB = 1 << 20
HIDDEN, FEATURES = 1024, 768
_DENSE = {
    "vocab_size": 16384,
    "hidden_size": HIDDEN,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_KINDS = {
    "experts": MoEArgs(HIDDEN, 16, FEATURES, RoutingRule(2, "softmax")),
    "packed": MoEArgs(
        HIDDEN, 16, FEATURES, RoutingRule(2, "softmax_of_chosen"),
        activation=ClampedSwiglu(7.0, 1.702), layout=InterleavedMXFP4(),
    ),
}  # fmt: skip


class Mixtures(CausalLM):
    """Nothing but mixtures of experts."""

    packed_modules_mapping: ClassVar = {}

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        super().__init__(config, build)
        made = (MoE(_KINDS[config["kind"]], build) for _ in range(config["num_hidden_layers"]))
        self.layers = nn.ModuleList(made)

    def forward(self, *args: Any) -> torch.Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def build(kind: str, layers: int, device: str) -> CausalLM:
    """A model of bfloat16, its weights uninitialised."""
    place = torch.device(device)
    context = BuildContext(torch.bfloat16, place, Communicator(TPGroup(0, 1, place)), 128)
    config = {"kind": kind, "num_hidden_layers": layers}
    return LlamaForCausalLM(_DENSE | config, context) if kind == "dense" else Mixtures(config, context)


def write(kind: str, layers: int, directory: Path, shard_bytes: int) -> None:
    """Random tensors of every name that the model wants, in files of at most so many bytes or one tensor."""
    shapes = {
        tensor.name: tensor.shape
        for target in load_targets(build(kind, layers, "meta"))
        for tensor in target.tensors
    }
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


def measured(kind: str, layers: int, directory: Path, mapped: bool) -> dict[str, int]:
    """`load` in a process of its own."""
    command = [sys.executable, "-m", "tests.helpers.load_memory", "load", kind, str(layers), str(directory)]
    environment = os.environ | {"ATOM_DISABLE_MMAP": str(int(not mapped))}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if ran.returncode:
        raise RuntimeError(ran.stderr)
    found: dict[str, int] = json.loads(ran.stdout)
    return found


def load(kind: str, layers: int, directory: Path) -> dict[str, int]:
    """Bytes of the weights, and the most that were resident beside them: mapped pages, and all others."""
    torch.set_num_threads(1)
    backend.resolve(torch.device("cpu"))
    (Path("/proc/self/clear_refs")).write_text("5")  # the peak starts anew
    before, own = _status("VmRSS"), _status("RssAnon")
    model = build(kind, layers, "cpu")
    most_own = 0

    def progress(done: int, total: int) -> None:
        nonlocal most_own
        most_own = max(most_own, _status("RssAnon"))

    load_weights(model, directory, progress)
    weights = weight_bytes(model)
    return {
        "weights": weights,
        "beside": _status("VmHWM") - before - weights,
        "beside_in_own_pages": most_own - own - weights,
    }


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def main() -> None:
    if sys.argv[1] == "load":
        kind, layers, directory = sys.argv[2:5]
        print(json.dumps(load(kind, int(layers), Path(directory))))
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
