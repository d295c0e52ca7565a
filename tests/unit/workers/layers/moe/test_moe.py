"""The mixture of experts and its weights, compared with transformers' modules and checkpoints."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from atom_ops import MXFP4, ClampedSwiglu, RoutingRule, tensors_of
from parallel.communicator import Communicator
from parallel.expert import ExpertDispatch, LocalDispatch, expert_dispatch
from parallel.mesh import Mesh
from tests.helpers.checkpoints.mxfp4 import packed_experts
from tests.helpers.checkpoints.tiny_models import MAX_MODEL_LEN
from workers.layers.causal_lm import CausalLM
from workers.layers.context import BuildContext
from workers.layers.moe.expert_layouts import INTERLEAVED, PerExpert
from workers.layers.moe.moe import MoE, MoEArgs
from workers.layers.quantization.config import resolve
from workers.weights.loader import WeightError, load_directory, load_dummy, weight_bytes
from workers.weights.plan import load_targets

HIDDEN, FEATURES, COUNT = 64, 96, 6
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Family:
    """A transformers config with one MoE layer, the path of its module, and our arguments for it."""

    model_type: str
    config: dict[str, Any]
    module: str
    args: dict[str, Any]
    renamed: Mapping[str, str] = field(default_factory=dict)


FAMILIES = {
    "qwen3_moe": Family(
        "qwen3_moe",
        {"num_experts": COUNT, "num_experts_per_tok": 3, "norm_topk_prob": True},
        "mlp",
        {"rule": RoutingRule(3, "softmax", renormalise=True)},
    ),
    "mixtral": Family(
        "mixtral",
        {"num_local_experts": COUNT, "num_experts_per_tok": 2},
        "mlp",
        {"rule": RoutingRule(2, "softmax", renormalise=True), "layout": PerExpert("w1", "w3", "w2")},
        {"mlp": "block_sparse_moe"},
    ),
    "glm4_moe": Family(
        "glm4_moe",
        {"n_routed_experts": COUNT, "num_experts_per_tok": 2, "n_shared_experts": 2, "n_group": 1,
         "topk_group": 1, "routed_scaling_factor": 2.5, "first_k_dense_replace": 0},
        "mlp",
        {"rule": RoutingRule(2, "sigmoid", renormalise=True, scale=2.5), "correction_bias": True,
         "router_dtype": torch.float32, "shared_features": 2 * FEATURES},
    ),
    "gpt_oss": Family(
        "gpt_oss",
        {"num_local_experts": COUNT, "num_experts_per_tok": 4},
        "mlp",
        {"rule": RoutingRule(4, "softmax_of_topk"), "activation": ClampedSwiglu(7.0, 1.702),
         "router_bias": True, "expert_bias": True, "layout": INTERLEAVED},
        {"gate": "router"},
    ),
}  # fmt: skip


class OneLayer(CausalLM):
    """A model of one MoE layer, named as that of layer 0 in checkpoints."""

    packed_modules_mapping: ClassVar = {"gate_up_proj": ("gate_proj", "up_proj")}

    def __init__(self, config: Mapping[str, Any], build: BuildContext):
        super().__init__(config, build)
        family: Family = config["family"]
        self.renamed_on_disk = family.renamed  # type: ignore[misc]
        self.unused_on_disk = ("*norm*", "*self_attn*", "*embed_tokens*", "lm_head*")
        args = MoEArgs(HIDDEN, COUNT, FEATURES, **{**family.args, **config.get("args", {})})
        layer = nn.Module()
        layer.mlp = MoE(args, replace(build, renamed=family.renamed).at("model.layers.0.mlp"))
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([layer])
        self.moe = layer.mlp

    def forward(self, *args: Any) -> torch.Tensor:
        raise NotImplementedError

    def compute_logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


MXFP4_CONFIG = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}


def build(
    family: Family,
    rank: int = 0,
    size: int = 1,
    packed: bool = False,
    dispatch: ExpertDispatch | None = None,
    **args: Any,
) -> OneLayer:
    context = BuildContext(
        torch.float32, torch.device("cpu"), Communicator(rank, size), MAX_MODEL_LEN,
        dispatch=dispatch or LocalDispatch(), quantization=resolve(MXFP4_CONFIG if packed else {}),
    )  # fmt: skip
    return OneLayer({"family": family, "args": args}, context)


def load(family: Family, directory: Path, rank: int = 0, size: int = 1, **args: Any) -> OneLayer:
    model = build(family, rank, size, **args)
    load_directory(model, directory, lambda done, total: None)
    return model


def save(family: Family, directory: Path, shard_size: str = "5GB") -> nn.Module:
    """transformers' MoE module; its model is saved in `directory`."""
    config = AutoConfig.for_model(
        family.model_type, vocab_size=16, hidden_size=HIDDEN, intermediate_size=FEATURES,
        moe_intermediate_size=FEATURES, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, **family.config,
    )  # fmt: skip
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    model.save_pretrained(directory, max_shard_size=shard_size)
    return model.model.layers[0].get_submodule(family.module)


def output_of(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found = module(x[None])
    return (found[0] if isinstance(found, tuple) else found)[0]


def inputs(tokens: int = 13) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(5))


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.mark.parametrize("unmapped", ["0", "1"])
def test_outputs_equal_transformers(
    tmp_path: Path, family: Family, unmapped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOM_DISABLE_MMAP", unmapped)
    reference = save(family, tmp_path)
    model = load(family, tmp_path)
    torch.testing.assert_close(model.moe(inputs()), output_of(reference, inputs()), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("size", [2, 5])
def test_the_partial_sums_of_ranks_add_up(tmp_path: Path, family: Family, size: int) -> None:
    """`place` makes no process group, so every sum stays partial; 96 features over 5 ranks are uneven."""
    reference = save(family, tmp_path)
    parts = []
    for rank in range(size):
        moe = load(family, tmp_path, rank, size).moe
        moe._tp = Communicator()
        parts.append(moe(inputs()))
    torch.testing.assert_close(sum(parts), output_of(reference, inputs()), atol=1e-4, rtol=1e-5)


def test_whole_experts_on_each_rank_add_up(tmp_path: Path, family: Family) -> None:
    """6 experts over 4 ranks: 2, 2, 1 and 1. Each rank has only those in memory."""
    reference = save(family, tmp_path)
    parts, experts_here = [], []
    for rank in range(4):
        ranks = Communicator(rank, 4)
        dispatch = expert_dispatch(Mesh(torch.device("cpu"), tp=ranks, ep=ranks), expert_parallel=True)
        moe = load(family, tmp_path, rank, 4, dispatch=dispatch).moe
        moe._tp = Communicator()
        parts.append(moe(inputs()))
        experts_here.append(moe.experts.down.numel() // (HIDDEN * FEATURES))
    assert experts_here == [2, 2, 1, 1]
    torch.testing.assert_close(sum(parts), output_of(reference, inputs()), atol=1e-4, rtol=1e-5)


def test_every_kind_of_tensor_has_an_effect(tmp_path: Path, family: Family) -> None:
    save(family, tmp_path)
    model = load(family, tmp_path)
    before = model.moe(inputs())
    buffers = {name: buffer for name, buffer in model.moe.named_buffers() if not buffer.is_mkldnn}
    assert len(buffers) >= 2
    for name, buffer in buffers.items():
        kept = buffer.clone()
        buffer += 0.5 * torch.randn(buffer.shape, generator=torch.Generator().manual_seed(1))
        assert (model.moe(inputs()) - before).abs().max() > 1e-3, name
        buffer.copy_(kept)


def test_missing_and_unused_tensors_are_named(tmp_path: Path, family: Family) -> None:
    """Any single missing tensor, and an additional one."""
    save(family, tmp_path)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    files = family.renamed.get("mlp", "mlp")
    mixture = [name for name in whole if f".{files}." in name]
    for name in {mixture[0], mixture[len(mixture) // 2], mixture[-1]}:
        save_file({other: tensor for other, tensor in whole.items() if other != name}, path)
        with pytest.raises(WeightError, match=f"lacks {name}"):
            load(family, tmp_path)
        save_file(whole | {name: torch.zeros(3, 5)}, path)
        with pytest.raises(WeightError, match=rf"{name} has shape \[3, 5\]; the configuration needs"):
            load(family, tmp_path)
    extra = f"model.layers.0.{files}.experts.{COUNT}.gate_proj.weight"
    save_file(whole | {extra: torch.zeros(1)}, path)
    with pytest.raises(WeightError, match=f"does not use: {extra}"):
        load(family, tmp_path)


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), (2, 3)])
def test_mxfp4_experts_stay_packed_and_equal_dequantized_ones(tmp_path: Path, rank: int, size: int) -> None:
    """96 features are 3 groups of 32: over 2 ranks, 2 groups and 1."""
    family = FAMILIES["gpt_oss"]
    save(family, tmp_path)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    names = [f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    packed, plain = packed_experts({name: whole.pop(name) for name in names})
    save_file(whole | packed, path)
    found = load(family, tmp_path, rank, size, packed=True).moe.experts
    save_file(whole | plain, path)
    features = (2 * 32 if (rank, size) == (0, 2) else 32) if size > 1 else FEATURES
    start = (0, 64)[rank] if size < 3 else 64
    gate_up, down = found.gate_up, found.down
    assert isinstance(gate_up, MXFP4) and isinstance(down, MXFP4)
    assert gate_up.shape == (COUNT, 2 * features, HIDDEN) and down.shape == (COUNT, HIDDEN, features)
    held = sum(tensor.nbytes for tensor in (*tensors_of(gate_up), *tensors_of(down)))
    assert held == 3 * COUNT * HIDDEN * features * 17 // 32
    every = load(family, tmp_path).moe.experts
    wanted_gate_up, wanted_down = every.gate_up, every.down
    assert isinstance(wanted_gate_up, torch.Tensor) and isinstance(wanted_down, torch.Tensor)
    kept = slice(start, start + features)
    rows = torch.cat([half[:, kept] for half in wanted_gate_up.chunk(2, 1)], 1)
    assert torch.equal(gate_up.dequantized(torch.float32), rows)
    assert torch.equal(down.dequantized(torch.float32), wanted_down[..., kept])


@pytest.mark.parametrize("packed", [False, True])
def test_a_slot_has_everything_of_its_expert(tmp_path: Path, packed: bool) -> None:
    """Matrices, scales and biases: with its bytes one expert becomes another."""
    family = FAMILIES["gpt_oss"]
    save(family, tmp_path)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    names = [f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    quantized, _ = packed_experts({name: whole[name] for name in names})
    if packed:
        save_file({name: whole[name] for name in whole if name not in names} | quantized, path)
    experts = load(family, tmp_path, packed=packed).moe.experts
    slots = experts.slot_tensors()
    assert sum(tensor.nbytes for tensor in slots) == sum(each.nbytes for each in experts.held_tensors())
    ids, weights = torch.full((13, 1), 4), torch.ones(13, 1)
    wanted = experts(inputs(), ids, weights)
    assert not torch.equal(experts(inputs(), ids - 3, weights), wanted)
    for tensor in slots:
        tensor[1].view(-1).view(torch.uint8).copy_(tensor[4].view(-1).view(torch.uint8))
    assert torch.equal(experts(inputs(), ids - 3, weights), wanted)


def test_dequantized_values_equal_transformers() -> None:
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(1, 250, (2, 6, 3), generator=generator).to(torch.uint8)
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).transpose(1, 2)
    assert torch.equal(MXFP4(blocks.flatten(-2), scales).dequantized(torch.bfloat16), wanted)


def test_mxfp4_inputs_must_be_a_multiple_of_the_block() -> None:
    family = FAMILIES["gpt_oss"]
    context = BuildContext(
        torch.float32, torch.device("cpu"), Communicator(), MAX_MODEL_LEN, quantization=resolve(MXFP4_CONFIG)
    )
    with pytest.raises(ValueError, match=r"experts: 40 inputs, not a multiple of 32 \(MXFP4\)"):
        MoE(MoEArgs(HIDDEN, COUNT, 40, **family.args), context)


def test_mxfp4_groups_are_not_cut_and_every_rank_has_one() -> None:
    with pytest.raises(
        ValueError, match="96 features are 3 blocks of 32, too few for --tensor-parallel-size 5"
    ):
        build(FAMILIES["gpt_oss"], 0, 5, packed=True)


def test_blocks_and_scales_may_be_in_two_files(tmp_path: Path) -> None:
    """A file may end between the blocks of a tensor and their scales."""
    family = FAMILIES["gpt_oss"]
    save(family, tmp_path)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    names = [f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    packed, _ = packed_experts({name: whole.pop(name) for name in names})
    save_file(whole | packed, path)
    wanted = load(family, tmp_path, packed=True)
    path.unlink()
    shards: dict[str, Tensors] = {"a.safetensors": whole, "b.safetensors": {}}
    for name, tensor in packed.items():
        shards["a.safetensors" if name.endswith("blocks") else "b.safetensors"][name] = tensor
    for name, tensors in shards.items():
        save_file(tensors, tmp_path / name)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = load(family, tmp_path, packed=True)
    assert torch.equal(found.moe(inputs()), wanted.moe(inputs()))


def test_dummy_weights_differ_by_expert_and_are_reproducible(family: Family) -> None:
    models = [build(family), build(family)]
    one, two = ({target.name: target.buffer for target in load_targets(model)} for model in models)
    for model in models:
        load_dummy(model, lambda done, total: None)
    matrices = [tensor for name, tensor in one.items() if ".experts." in name and tensor.dim() == 2]
    assert len(matrices) == 3 * COUNT
    assert len({float(tensor.sum()) for tensor in matrices}) == 3 * COUNT
    assert all(tensor.std() > 0.01 for tensor in matrices)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert models[0].moe(inputs()).isfinite().all()


def test_weight_bytes_include_all_buffers(family: Family) -> None:
    model = build(family)
    assert weight_bytes(model) == sum(buffer.nbytes for buffer in model.buffers())


def test_an_unsupported_activation_is_refused(family: Family) -> None:
    with pytest.raises(ValueError, match="hidden_act gelu is not supported"):
        build(family, hidden_act="gelu")
