"""What a checkpoint must contain, and the shards that each rank loads of it."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel.communicator import Communicator
from tests.helpers.checkpoints.tiny_models import (
    MAX_MODEL_LEN,
    TINY_MODELS,
    Tiny,
    checkpoint_of,
    save_tiny,
    tiny,
)
from workers.layers.causal_lm import CausalLM
from workers.layers.context import BuildContext
from workers.models.registry import build_model, model_class
from workers.weights.loader import WeightError, load_directory, load_dummy, load_weights, weight_bytes
from workers.weights.plan import load_targets, weighted_layers

Tensors = dict[str, torch.Tensor]
GATE = "model.layers.1.mlp.gate_proj.weight"


def build(directory: Path, rank: int = 0, size: int = 1) -> torch.nn.Module:
    checkpoint = checkpoint_of(directory)
    context = BuildContext(torch.float32, torch.device("cpu"), Communicator(rank, size), MAX_MODEL_LEN)
    return build_model(checkpoint, context)


def load(directory: Path, rank: int = 0, size: int = 1) -> torch.nn.Module:
    model = build(directory, rank, size)
    load_directory(model, directory, lambda done, total: None)
    return model


def contents(model: CausalLM) -> Tensors:
    return {
        f"{path}.{number}": tensor.clone()
        for path, layer in weighted_layers(model)
        for number, tensor in enumerate(layer.held_tensors())
    }


@pytest.fixture
def plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the plain weights, which tests can read."""
    monkeypatch.setattr("workers.layers.linear.pack_linear_weight", lambda weight: weight)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_tiny(tiny("llama-biases"), directory)
    return directory


def rewrite(directory: Path, change: Callable[[Tensors], None]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def _remove(tensors: Tensors) -> None:
    del tensors[GATE]


def _reshape(tensors: Tensors) -> None:
    tensors[GATE] = tensors[GATE].t().contiguous()


def _add(tensors: Tensors) -> None:
    tensors["model.layers.1.mlp.gate_proj.weight_scale"] = torch.ones(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_remove, f"lacks {GATE}"),
        (_reshape, rf"{GATE} has shape \[72, 100\]; the configuration needs \[100, 72\]"),
        (_add, f"does not use: {GATE}_scale"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, change: Callable[[Tensors], None], message: str
) -> None:
    save_tiny(tiny("llama-gqa"), tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(WeightError, match=message):
        load(tmp_path)


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    save_tiny(tiny("llama-gqa"), tmp_path)

    def drop_layers(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".layers." in name]:
            del tensors[name]

    rewrite(tmp_path, drop_layers)
    with pytest.raises(WeightError, match=r"input_layernorm.* and 22 more"):
        load(tmp_path)


def test_unneeded_tensors_of_old_and_tied_checkpoints_are_ignored(tmp_path: Path) -> None:
    save_tiny(tiny("llama-mha-tied"), tmp_path)

    def add(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        for table in ("inv_freq", "cos_cached", "sin_cached"):
            tensors[f"model.layers.0.self_attn.rotary_emb.{table}"] = torch.ones(8)

    rewrite(tmp_path, add)
    load(tmp_path)


def test_biases_of_zeros_are_not_needed(tmp_path: Path) -> None:
    """AutoGPTQ stored one for every quantized layer."""
    save_tiny(tiny("llama-gqa"), tmp_path)
    biases = {
        f"model.layers.{layer}.{module}.bias": torch.zeros(features)
        for layer in range(3)
        for module, features in (("self_attn.q_proj", 64), ("mlp.down_proj", 72))
    }
    rewrite(tmp_path, lambda tensors: tensors.update(biases))
    load(tmp_path)
    load_weights(build(tmp_path), load_file(tmp_path / "model.safetensors").items(), lambda *done: None)
    name = "model.layers.1.mlp.down_proj.bias"
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.full((72,), 1e-6)}))
    with pytest.raises(WeightError, match=re.escape(name)):
        load(tmp_path)
    with pytest.raises(WeightError, match=re.escape(name)):
        load_weights(build(tmp_path), load_file(tmp_path / "model.safetensors").items(), lambda *done: None)
    rewrite(
        tmp_path, lambda tensors: tensors.update({name: torch.zeros(72), "model.other.bias": torch.zeros(2)})
    )
    with pytest.raises(WeightError, match=r"model\.other\.bias"):
        load(tmp_path)


def test_mtp_layers_are_not_loaded(tmp_path: Path) -> None:
    """GLM-4-MoE has num_nextn_predict_layers of them after the last layer."""
    save_tiny(tiny("glm4-moe"), tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.3.eh_proj.weight": torch.ones(2, 4)}))
    load(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.4.eh_proj.weight": torch.ones(2, 4)}))
    with pytest.raises(WeightError, match=r"does not use: model\.layers\.4\.eh_proj"):
        load(tmp_path)


def test_an_untied_lm_head_is_required(tmp_path: Path) -> None:
    save_tiny(tiny("llama-gqa"), tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(WeightError, match=r"lacks lm_head\.weight"):
        load(tmp_path)


def test_sharded_files_equal_a_single_file(tmp_path: Path, saved: Path, plain_weights: None) -> None:
    save_tiny(tiny("llama-biases"), tmp_path, shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    one, many = contents(load(saved)), contents(load(tmp_path))
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_a_file_that_the_index_names_must_exist(tmp_path: Path) -> None:
    save_tiny(tiny("llama-gqa"), tmp_path, shard_size="100KB")
    lost = sorted(tmp_path.glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ValueError, match=f"{lost.name} is missing"):
        load(tmp_path)


@pytest.mark.parametrize("named", ["../weights", "..", "", "."])
def test_an_index_cannot_name_files_elsewhere(tmp_path: Path, named: str) -> None:
    save_tiny(tiny("llama-gqa"), tmp_path, shard_size="100KB")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(re.sub(r"model-00002[^\"]*", named, index.read_text()))
    with pytest.raises(ValueError, match="not a file next to it"):
        load(tmp_path)


@pytest.mark.parametrize("unmapped", ["0", "1"])
def test_files_that_do_not_hold_what_the_index_says_are_named(
    tmp_path: Path, unmapped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOM_DISABLE_MMAP", unmapped)
    save_tiny(tiny("llama-gqa"), tmp_path, shard_size="100KB")
    last = max(tmp_path.glob("model-*.safetensors"))
    tensors = load_file(last)
    name = min(tensors)
    save_file({each: tensor for each, tensor in tensors.items() if each != name}, last)
    model, read = build(tmp_path), list[int]()
    with pytest.raises(ValueError, match=f"{last} does not hold {name}, which model.safetensors.index.json"):
        load_directory(model, tmp_path, lambda done, total: read.append(done))
    assert not read
    last.write_bytes(b"no header at all")
    with pytest.raises(ValueError, match=f"{last} is not a (valid|complete) safetensors file"):
        load(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text()[:-9])
    with pytest.raises(ValueError, match=f"{index} does not state the file of each tensor"):
        load(tmp_path)


def test_a_tensor_of_another_size_than_its_shape_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tiny("llama-gqa"), tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"F64"', 1))
    for unmapped, message in (("0", "is not a valid safetensors file"), ("1", "is damaged: .* has .* bytes")):
        monkeypatch.setenv("ATOM_DISABLE_MMAP", unmapped)
        with pytest.raises(ValueError, match=message):
            load(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    save_tiny(tiny("llama-gqa"), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has no safetensors files"):
        load(tmp_path)


def test_reading_without_mmap_gives_the_same(
    saved: Path, plain_weights: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped = contents(load(saved, 1, 2))
    monkeypatch.setenv("ATOM_DISABLE_MMAP", "1")
    monkeypatch.setattr("workers.weights.files.safe_open", _only_names)
    read = contents(load(saved, 1, 2))
    assert all(torch.equal(mapped[name], read[name]) for name in mapped)


class _only_names:
    """safe_open that lists names only: reading a tensor fails."""

    def __init__(self, path: Path, framework: str):
        self._names = list(load_file(path))

    def __enter__(self) -> "_only_names":
        return self

    def __exit__(self, *error: object) -> None: ...

    def keys(self) -> list[str]:
        return self._names


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_together_hold_every_tensor(saved: Path, plain_weights: None, size: int) -> None:
    """llama-biases has 2 KV heads: two ranks shard every tensor, three are refused."""
    if size == 3:
        with pytest.raises(ValueError, match="--tensor-parallel-size 3"):
            load(saved, 0, size)
        return
    on_disk = load_file(saved / "model.safetensors")
    ranks = [
        {target.name: target for target in load_targets(load(saved, rank, size))} for rank in range(size)
    ]
    for name, tensor in on_disk.items():
        parts = [rank[name] for rank in ranks]
        if parts[0].shard.kept.size == parts[0].shard.kept.total:
            assert all(torch.equal(part.buffer, tensor) for part in parts), name
        else:
            together = torch.cat([part.buffer for part in parts], dim=parts[0].shard.dim)
            assert torch.equal(together, tensor), name


def test_odd_heads_are_sharded_in_whole_groups(tmp_path: Path, plain_weights: None) -> None:
    save_tiny(tiny("llama-odd-gqa"), tmp_path)
    shapes = [
        {target.name: tuple(target.buffer.shape) for target in load_targets(build(tmp_path, rank, 2))}
        for rank in (0, 1)
    ]
    attention = "model.layers.0.self_attn"
    assert [shape[f"{attention}.q_proj.weight"] for shape in shapes] == [(48, 72), (24, 72)]
    assert [shape[f"{attention}.k_proj.weight"] for shape in shapes] == [(16, 72), (8, 72)]
    assert [shape[f"{attention}.o_proj.weight"] for shape in shapes] == [(72, 48), (72, 24)]


def test_two_ranks_hold_half_the_bytes_each(saved: Path) -> None:
    whole = weight_bytes(load(saved))
    halves = [weight_bytes(load(saved, rank, 2)) for rank in (0, 1)]
    assert all(0.49 * whole < half < 0.53 * whole for half in halves)


def test_dummy_weights_need_no_files_and_are_reproducible(saved: Path, plain_weights: None) -> None:
    first, second = build(saved), build(saved)
    calls: list[tuple[int, int]] = []
    load_dummy(first, lambda done, total: calls.append((done, total)))
    load_dummy(second, lambda done, total: None)
    one, two = ({target.name: target.buffer for target in load_targets(model)} for model in (first, second))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert one[GATE].std() > 0.01 and not torch.equal(one[GATE], one[GATE.replace("layers.1", "layers.0")])
    assert calls[-1] == (len(one), len(one)) and len(calls) == len(one)


@pytest.mark.parametrize("family", sorted({model.model_type for model in TINY_MODELS}))
def test_dummy_weights_of_every_family_fill_all_buffers(
    tmp_path: Path, plain_weights: None, family: str
) -> None:
    (row, *_) = (model for model in TINY_MODELS if model.model_type == family)
    save_tiny(row, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model = build(tmp_path)
    for target in load_targets(model):
        target.buffer.fill_(float("nan") if target.buffer.is_floating_point() else -1)
    load_dummy(model, lambda done, total: None)
    assert all(tensor.isfinite().all() and not (tensor == -1).any() for tensor in contents(model).values())


def test_unknown_families_are_refused_with_the_supported_ones(saved: Path) -> None:
    for field, value, message in (
        ("model_type", "registry", "is supported as model type llama, not registry"),
        ("model_type", "os.path", "is supported as model type llama, not os.path"),
        (
            "architecture",
            "LlamaForSequenceClassification",
            "is not supported; supported are: .*LlamaForCausalLM",
        ),
    ):
        checkpoint = checkpoint_of(saved)
        object.__setattr__(checkpoint, field, value)
        with pytest.raises(ValueError, match=message):
            model_class(checkpoint)


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act gelu is not supported"),
        ("llama", {"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4}}, "rope type mrope is not"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "lacks rope_parameters.factor"),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "llama with a partial_rotary_factor",
        ),
        ("qwen3", {"layer_types": ["sliding_attention"]}, "sliding_window is not set"),
        ("qwen2", {"layer_types": ["full_attention"] * 2}, "for each of the 1 layers"),
        ("qwen2", {"layer_types": ["linear_attention"]}, "must be one of full_attention"),
    ],
)
def test_unsupported_configurations_are_refused(
    tmp_path: Path, family: str, change: dict[str, object], message: str
) -> None:
    save_tiny(Tiny("small", family, 1, {"num_hidden_layers": 1}), tmp_path)
    checkpoint = checkpoint_of(tmp_path)
    checkpoint.hf_config.update(change)
    context = BuildContext(torch.float32, torch.device("cpu"), Communicator(), MAX_MODEL_LEN)
    with pytest.raises(ValueError, match=message):
        build_model(checkpoint, context)
