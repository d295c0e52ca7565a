"""GGUF files with quantized matrices: their blocks, and the models that keep their integers."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from atom.shared.config.model import ModelConfig
from atom_ops import PackedInts, backend, native_impl
from parallel.communicator import Communicator
from tests.helpers.checkpoints.gguf_files import TOKENS, Sizes, Type, hf_weights, random_blocks, write_gguf
from tests.helpers.checkpoints.tiny_models import hf_logits
from tests.helpers.engine.teacher_forcing import TinyWorker, forced_logits
from tests.helpers.parallel.thread_ranks import on_ranks
from workers.checkpoint.prepare import prepare
from workers.layers.embedding import LMHead, VocabEmbedding
from workers.layers.linear import Linear
from workers.layers.quantization.config import resolve
from workers.weights.gguf import convert
from workers.weights.gguf_blocks import KEPT, Format, decoded, in_format, joined, kept_format

CPU = torch.device("cpu")
ROUNDED = 3e-3
"""What rounding activations to 16 bits may do to a logit."""
SIZES = Sizes(heads=8, kv_heads=4, head_dim=32, hidden=256, ffn=512, layers=3)
IDS = [int(number) for number in np.random.default_rng(1).integers(0, len(TOKENS) - 2, 48)]


@pytest.fixture(autouse=True)
def resolved() -> Iterator[None]:
    yield
    backend.resolve(CPU)


@pytest.mark.parametrize("kind", KEPT, ids=lambda kind: kind.name)
def test_blocks_have_the_numbers_that_the_package_gguf_reads(kind: Type) -> None:
    rows = random_blocks((7, 768), kind, 1.0, seed=3)
    expected = torch.from_numpy(gguf.quants.dequantize(rows, kind))
    weight, format = decoded(rows, kind), kept_format(kind)
    found = Format(weight.bits, weight.group, weight.offsets is not None, weight.scale_units is not None)
    assert found == format
    torch.testing.assert_close(weight.dequantized(torch.float32), expected, atol=1e-6, rtol=1e-6)
    others = (Format(8, 16, True), Format(6, 16, True, True), Format(4, 16, True, True), Format(4, 32))
    for other in others:
        wanted = joined(format, other)
        wide = in_format(weight, wanted)
        found = Format(wide.bits, wide.group, wide.offsets is not None, wide.scale_units is not None)
        assert found == wanted
        torch.testing.assert_close(wide.dequantized(torch.float32), expected, atol=1e-6, rtol=1e-6)


def types_of_layers() -> dict[str, Type]:
    """Fused matrices of one type, of several, and one next to plain ones."""
    layers = [f"model.layers.{number}" for number in range(SIZES.layers)]
    mixed = {"q": Type.Q4_K, "k": Type.Q4_0, "v": Type.Q6_K}
    types = {f"{layers[0]}.self_attn.{each}_proj.weight": kind for each, kind in mixed.items()}
    types |= {f"{layers[0]}.mlp.{each}_proj.weight": Type.Q4_0 for each in ("gate", "up")}
    types |= {f"{layers[1]}.self_attn.{each}_proj.weight": Type.Q5_K for each in "qkv"}
    types |= {f"{layers[1]}.mlp.gate_proj.weight": Type.Q4_1, f"{layers[1]}.mlp.up_proj.weight": Type.Q5_0}
    types |= {f"{layers[2]}.self_attn.{each}_proj.weight": Type.Q8_0 for each in "qk"}
    types |= {f"{layers[2]}.mlp.{each}_proj.weight": Type.Q5_1 for each in ("gate", "up")}
    for layer, down in zip(layers, (Type.Q6_K, Type.Q4_K, Type.Q8_0), strict=True):
        types |= {f"{layer}.mlp.down_proj.weight": down, f"{layer}.self_attn.o_proj.weight": Type.Q4_K}
    return types


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(The file, the directory that it is converted to)."""
    path = tmp_path_factory.mktemp("gguf")
    weights = hf_weights(request.param, SIZES)
    small = {name: array * (0.05 if array.ndim > 1 else 1) for name, array in weights.items()}
    types = types_of_layers() | {"model.embed_tokens.weight": Type.Q6_K, "lm_head.weight": Type.Q8_0}
    write_gguf(path / "m.gguf", small, types=types, sizes=SIZES)
    found = prepare(ModelConfig(model=str(path / "m.gguf")), path / "cache", lambda *report: None)
    assert found.dtype == "bfloat16"
    return path / "m.gguf", Path(found.directory)


def reference_of(path: Path) -> torch.Tensor:
    """The logits of transformers."""
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return hf_logits(model, IDS)


def logits_of(ours: TinyWorker) -> torch.Tensor:
    core = ours.core()
    core.add(0, IDS)
    return forced_logits(ours.worker, core, 0, [30, 18])


@pytest.mark.skipif(not native_impl.runs_on(CPU), reason="needs a C++ compiler")
def test_a_model_keeps_its_integers_and_gives_the_logits_of_transformers(files: tuple[Path, Path]) -> None:
    path, directory = files
    backend.resolve(CPU)
    ours = TinyWorker(directory)
    model = ours.worker._runner._model
    linears = {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear)}
    plain = [name for name, layer in linears.items() if not isinstance(layer.weight, PackedInts)]
    assert plain == ["model.layers.2.self_attn.qkv_proj"]  # its v is in float32
    bits = {name: layer.weight.bits for name, layer in linears.items() if name not in plain}
    assert {name.removeprefix("model.layers.") for name in bits if bits[name] == 4} == {
        "0.self_attn.o_proj", "1.self_attn.o_proj", "2.self_attn.o_proj", "0.mlp.gate_up_proj",
        "1.mlp.down_proj",
    }  # fmt: skip
    assert isinstance(model.get_submodule("lm_head").weight, PackedInts)
    torch.testing.assert_close(logits_of(ours), reference_of(path), atol=ROUNDED, rtol=0)


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q5_0, Type.Q8_0], ids=lambda kind: kind.name)
def test_scales_that_are_float16_in_the_file_are_exact(tmp_path: Path, kind: Type) -> None:
    weights = {
        name: array * (0.05 if array.ndim > 1 else 1) for name, array in hf_weights(sizes=SIZES).items()
    }
    write_gguf(tmp_path / "m.gguf", weights, types=kind, sizes=SIZES)
    found = prepare(ModelConfig(model=str(tmp_path / "m.gguf")), tmp_path / "cache", lambda *report: None)
    expected = reference_of(tmp_path / "m.gguf")
    torch.testing.assert_close(
        logits_of(TinyWorker(Path(found.directory))), expected, atol=ROUNDED / 4, rtol=0
    )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_qwen_models_give_the_logits_of_transformers(tmp_path: Path, kind: str, tied: bool) -> None:
    sizes = replace(SIZES, heads=2, kv_heads=1, head_dim=128)  # of all Qwen3
    weights = {
        name: array * (0.05 if array.ndim > 1 else 1) for name, array in hf_weights(tied, sizes, kind).items()
    }
    types = {name: Type.Q6_K if "v_proj" in name else Type.Q4_K for name in weights if "embed" not in name}
    write_gguf(tmp_path / "m.gguf", weights, kind, types, sizes)
    found = prepare(ModelConfig(model=str(tmp_path / "m.gguf")), tmp_path / "cache", lambda *report: None)
    expected = reference_of(tmp_path / "m.gguf")
    torch.testing.assert_close(
        logits_of(TinyWorker(Path(found.directory))), expected, atol=ROUNDED / 4, rtol=0
    )


@pytest.mark.usefixtures("torch_ops")
def test_without_a_compiler_and_on_gpus_it_is_dequantized(files: tuple[Path, Path]) -> None:
    path, directory = files
    ours = TinyWorker(directory)
    layers = [layer for layer in ours.worker._runner._model.modules() if isinstance(layer, Linear)]
    assert layers and not any(isinstance(layer.weight, PackedInts) for layer in layers)
    torch.testing.assert_close(logits_of(ours), reference_of(path), atol=1e-4, rtol=0)


def test_ranks_share_a_quantized_model(files: tuple[Path, Path]) -> None:
    path, directory = files
    expected = reference_of(path)

    def run(tp: Communicator) -> torch.Tensor:
        return logits_of(TinyWorker(directory, tp=tp))

    for found in on_ranks(2, run):
        torch.testing.assert_close(found, expected, atol=ROUNDED, rtol=0)


def test_other_types_are_expanded(tmp_path: Path) -> None:
    weights = hf_weights(sizes=SIZES)
    kinds = (Type.IQ3_XXS, Type.BF16, Type.F16)
    names = [name for name in weights if name.endswith(("down_proj.weight", "o_proj.weight"))]
    types = dict(zip(names, kinds, strict=False))
    write_gguf(tmp_path / "m.gguf", weights, types=types, sizes=SIZES)
    config = ModelConfig(model=str(tmp_path / "m.gguf"))
    directory = Path(prepare(config, tmp_path / "cache", lambda *report: None).directory)
    stored = load_file(directory / "model.safetensors")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    for name, parameter in reference.state_dict().items():
        torch.testing.assert_close(stored[name].float(), parameter, atol=0, rtol=0)


def test_a_quantized_file_is_expanded_on_demand(files: tuple[Path, Path], tmp_path: Path) -> None:
    convert(files[0], tmp_path, lambda *report: None, keep_integers=False)
    reference = AutoModelForCausalLM.from_pretrained(files[0].parent, gguf_file="m.gguf", dtype=torch.float32)
    expanded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, parameter in expanded.state_dict().items():
        assert torch.equal(parameter, reference.state_dict()[name]), name


@pytest.mark.parametrize("modules", [None, [], {"int3_32": ["a"]}, {"int4_64": ["a"]}, {"int8_32": "a"}])
def test_configs_that_no_conversion_writes_are_refused(modules: object) -> None:
    with pytest.raises(ValueError, match=r"^quantized \(gguf\) with .*: not supported"):
        resolve({"quantization_config": {"quant_method": "gguf", "modules": modules}})


def test_a_tied_embedding_stays_plain(files: tuple[Path, Path]) -> None:
    model = TinyWorker(files[1]).worker._runner._model
    embedding, head = model.get_submodule("model.embed_tokens"), model.get_submodule("lm_head")
    assert isinstance(embedding, VocabEmbedding) and isinstance(head, LMHead)
    assert isinstance(embedding.weight, torch.Tensor) and embedding.weight.shape == head.weight.shape
