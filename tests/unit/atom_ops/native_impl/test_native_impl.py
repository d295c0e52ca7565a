"""Kernels in C++: their attention, their linear layers, and how they round."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch

import atom_ops
from atom_ops import backend, native_impl
from atom_ops.native_impl.build import library
from atom_ops.op import REGISTRY
from tests.helpers.kernels.paged_step import Step

CPU = torch.device("cpu")
BF16 = torch.bfloat16
gelu_tanh = partial(torch.nn.functional.gelu, approximate="tanh")
CONTEXTS = [1, 16, 17, 63, 64, 65, 600]

pytestmark = pytest.mark.skipif(not native_impl.runs_on(CPU), reason="needs a C++ compiler")


@pytest.fixture(autouse=True)
def only_native() -> Iterator[None]:
    backend.resolve(CPU, ["native"])
    yield
    backend.resolve(CPU)


def ran_native(op: str) -> bool:
    return op not in backend.ran_in_torch()


@pytest.mark.parametrize(("window", "sinks"), [(0, False), (1, True), (40, False), (64, True), (0, True)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"), [(9, 3, 64), (4, 4, 16), (7, 1, 80), (12, 2, 128), (2, 1, 256)]
)
def test_attention_of_decodes(heads: int, kv_heads: int, width: int, window: int, sinks: bool) -> None:
    step = Step([1] * len(CONTEXTS), CONTEXTS, heads, kv_heads, width=width, window=window, sinks=sinks)
    torch.testing.assert_close(step.run().double(), step.expected(), atol=1e-5, rtol=1e-5)
    assert ran_native("paged_attention")


@pytest.mark.parametrize("block_size", [1, 7, 64])
def test_attention_with_drafts_and_other_blocks(block_size: int) -> None:
    step = Step([4, 1, 3, 2], [4, 300, 70, 64], 8, 2, block_size, width=64, window=50)
    torch.testing.assert_close(step.run().double(), step.expected(), atol=1e-5, rtol=1e-5)
    assert ran_native("paged_attention")


@pytest.mark.parametrize(("window", "sinks"), [(0, False), (1, True), (40, False), (0, True)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"), [(9, 3, 64), (4, 4, 16), (7, 1, 80), (12, 2, 128), (2, 1, 256)]
)
def test_attention_of_decodes_in_bfloat16(
    heads: int, kv_heads: int, width: int, window: int, sinks: bool
) -> None:
    """Contexts end with a pair of tokens or with half of one, and begin at any token of a block."""
    counts, contexts = [1] * 9 + [2, 3, 4], [*CONTEXTS, 31, 34, 33, 80, 4]
    step = Step(
        counts, contexts, heads, kv_heads, 7, BF16, BF16, width=width, window=window, sinks=sinks
    )  # fmt: skip
    torch.testing.assert_close(step.run().double(), step.expected(), atol=1e-2, rtol=1e-2)
    assert ran_native("paged_attention")


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_decode_has_the_same_bits_with_other_rows_and_threads(dtype: torch.dtype) -> None:
    contexts = [1, 333, 40, 2000, 65, 1000]  # with two threads a task has one, two or three heads of them
    step = Step([1] * 6, contexts, 9, 3, cache_dtype=dtype, dtype=dtype, width=64)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            found.append(step.run())
            for row, context in enumerate(contexts):
                plan = atom_ops.plan_attention(
                    np.ones(1, np.int32), np.array([context], np.int32), step.table[row : row + 1], CPU
                )
                alone = atom_ops.paged_attention(step.q[row : row + 1], step.cache, plan, step.rule)
                assert torch.equal(alone[0], found[0][row])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_padding_rows_result_in_zeros_and_others_are_skipped() -> None:
    step = Step([1, 1], [5, 40], 4, 2, width=64)
    table = np.zeros((4, step.table.shape[1]), np.int32)
    table[:2] = step.table
    plan = atom_ops.AttentionPlan(
        torch.from_numpy(table),
        torch.tensor([5, 40, 0, 3], dtype=torch.int32),
        torch.tensor([0, 1, 2, 3, 3], dtype=torch.int32),
        num_tokens=3, min_query_len=1, max_query_len=1, max_context_len=40,
    )  # fmt: skip
    q_THE = torch.cat((step.q, torch.full_like(step.q[:1], torch.nan)))
    out_THE = atom_ops.paged_attention(q_THE, step.cache, plan, step.rule)
    torch.testing.assert_close(out_THE[:2].double(), step.expected(), atol=1e-5, rtol=1e-5)
    assert not out_THE[2].any() and ran_native("paged_attention")


@pytest.mark.parametrize(("window", "sinks"), [(0, False), (1, True), (40, False), (100, True)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"), [(9, 3, 64), (4, 4, 16), (7, 1, 80), (12, 2, 128), (2, 1, 256)]
)
def test_attention_of_prompts_with_decodes(
    heads: int, kv_heads: int, width: int, window: int, sinks: bool
) -> None:
    counts, contexts = [5, 1, 70, 33, 1, 16, 130], [5, 200, 70, 333, 1, 80, 131]
    step = Step(counts, contexts, heads, kv_heads, width=width, window=window, sinks=sinks)
    torch.testing.assert_close(step.run().double(), step.expected(), atol=1e-5, rtol=1e-5)
    assert ran_native("paged_attention")


@pytest.mark.parametrize(("block_size", "width"), [(1, 16), (7, 64), (64, 80), (16, 128), (16, 256)])
def test_attention_of_prompts_in_bfloat16(block_size: int, width: int) -> None:
    counts, contexts = [5, 1, 63, 65, 127], [5, 200, 63, 366, 127]
    step = Step(counts, contexts, 9, 3, block_size, dtype=BF16, cache_dtype=BF16, width=width)
    torch.testing.assert_close(step.run().double(), step.expected(), atol=1e-2, rtol=1e-2)
    assert ran_native("paged_attention")


@pytest.mark.parametrize(
    "rule",
    [
        {"window": 1, "sinks": True},
        {"window": 40},
        {"window": 64, "chunked": True},
        {"window": 100, "sinks": True, "soft_cap": 2.0},
        {"soft_cap": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"), [(9, 3, 64), (4, 4, 16), (7, 1, 80), (4, 2, 128), (2, 1, 256)]
)
def test_rules_of_prompts_in_bfloat16(
    heads: int, kv_heads: int, width: int, rule: dict[str, float | bool]
) -> None:
    """Contexts end with a chunk of one key, of an odd number and of all; what no query sees is poisoned."""
    counts, contexts = [5, 1, 70, 63, 193, 6], [65, 200, 70, 333, 193, 128]
    step = Step(counts, contexts, heads, kv_heads, dtype=BF16, cache_dtype=BF16, width=width, **rule)  # type: ignore[arg-type]
    torch.testing.assert_close(step.run().double(), step.expected(), atol=1e-2, rtol=1e-2)
    assert ran_native("paged_attention")


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("width", [64, 80])
def test_a_prompt_in_pieces_has_the_bits_of_the_whole(width: int, window: int) -> None:
    if not library().atom_has_tiles():
        pytest.skip("needs AMX; other tiles begin with their window")
    step = Step([400], [400], 9, 3, dtype=BF16, cache_dtype=BF16, width=width, window=window)
    whole = step.run()
    ends = [37, 100, 105, 333, 400]
    for first, end in zip([0, *ends], ends, strict=False):
        plan = atom_ops.plan_attention(
            np.array([end - first], np.int32), np.array([end], np.int32), step.table, CPU
        )
        found = atom_ops.paged_attention(step.q[first:end], step.cache, plan, step.rule)
        assert torch.equal(found, whole[first:end])


@pytest.mark.parametrize("tokens", [1, 20])
def test_a_nan_stays_in_its_row(tokens: int) -> None:
    step = Step([tokens, tokens], [70, 40], 4, 2, width=64)
    wanted = step.run()[tokens:].clone()
    step.q[:tokens] = torch.nan
    out_THE = step.run()
    assert out_THE[:tokens].isnan().all() and torch.equal(out_THE[tokens:], wanted)


def test_a_nan_of_one_query_reaches_no_other() -> None:
    step = Step([20], [40], 4, 2, width=64)
    wanted = step.run().clone()
    step.q[7, 1] = torch.nan
    out_THE = step.run()
    assert out_THE[7, 1].isnan().all()
    out_THE[7, 1] = wanted[7, 1]
    assert torch.equal(out_THE, wanted)


def test_sums_are_rounded_as_torch_rounds_them() -> None:
    generator = torch.Generator().manual_seed(1)
    x, residual = torch.randn(2, 64, 256, generator=generator).mul(100).to(BF16)
    x[0, :6] = torch.tensor([torch.nan, torch.inf, -torch.inf, 3.38e38, 1e-40, 0.0])
    residual[0, :6] = torch.tensor([1.0, 1.0, torch.inf, 3.38e38, 1e-40, -0.0])
    _, total = atom_ops.add_rms_norm(x, residual, torch.ones(256, dtype=BF16), 1e-6)
    torch.testing.assert_close(total, x + residual, atol=0, rtol=0, equal_nan=True)
    assert ran_native("add_rms_norm")


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("op", [atom_ops.silu_and_mul, atom_ops.gelu_tanh_and_mul])
def test_large_gates(op: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
    gate = torch.tensor([torch.inf, 1e4, 100.0, 1e-30, 0.0, -1e-30, -100.0, -1e4, torch.nan, 1.0, -1.0] * 3)
    found = op(torch.stack((gate, torch.ones_like(gate)), 0).reshape(1, -1).to(dtype))[0]
    activate = torch.nn.functional.silu if op is atom_ops.silu_and_mul else gelu_tanh
    tolerance = 1e-2 if dtype == BF16 else 1e-6
    torch.testing.assert_close(found.float(), activate(gate), atol=1e-30, rtol=tolerance, equal_nan=True)


def test_a_large_step_in_threads_is_that_of_one_thread() -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(300, 512, generator=generator), torch.rand(512, generator=generator)
    whole = atom_ops.rms_norm(x, weight, 1e-6), atom_ops.silu_and_mul(x)
    for row in (0, 150, 299):
        alone = x[row : row + 1].contiguous()
        assert torch.equal(whole[0][row], atom_ops.rms_norm(alone, weight, 1e-6)[0])
        assert torch.equal(whole[1][row], atom_ops.silu_and_mul(alone)[0])


F32 = torch.float32


@pytest.fixture(params=[BF16, F32], ids=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    dtype: torch.dtype = request.param
    if not native_impl.has("linear", dtype):
        pytest.skip("needs AVX-512 for bfloat16")
    return dtype


def layer(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, weight, bias); the weight's numbers are of bfloat16."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator) * inputs**-0.5
    return x.to(dtype), weight.to(BF16).to(dtype), torch.randn(outputs, generator=generator).to(dtype)


@pytest.mark.parametrize("rows", [0, 1, 4, 6, 7, 17, 33, 400])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 2), (49, 70), (160, 576), (1000, 64), (70, 9000)])
def test_linear_layers(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x, weight, bias = layer(rows, outputs, inputs, dtype)
    packed = atom_ops.pack_linear_weight(weight)
    assert isinstance(packed, atom_ops.PackedPanels)
    assert (packed.shape, packed.dtype, packed.tensor.dtype) == ((outputs, inputs), dtype, BF16)
    wanted = x.double() @ weight.double().T + bias
    found = atom_ops.linear(x, packed, bias, F32)
    torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-4)
    assert torch.equal(atom_ops.linear(x, packed, bias), found.to(dtype)) and ran_native("linear")


def test_a_row_of_a_linear_layer_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    x, weight, bias = layer(130, 200, 5000, dtype)
    packed = atom_ops.pack_linear_weight(weight)
    whole = atom_ops.linear(x, packed, bias)
    x[5] = torch.nan
    with_nan = atom_ops.linear(x, packed, bias)
    assert with_nan[5].isnan().all()
    for row in (0, 4, 6, 64, 129):
        alone = atom_ops.linear(x[row : row + 1], packed, bias)[0]
        assert torch.equal(alone, whole[row]) and torch.equal(alone, with_nan[row])


def test_infinite_weights_stay_infinite(dtype: torch.dtype) -> None:
    weight = torch.eye(32).to(dtype)
    weight[3, 4] = torch.inf
    out = atom_ops.linear(torch.ones(2, 32, dtype=dtype), atom_ops.pack_linear_weight(weight))
    assert out[:, 3].isinf().all() and out.isfinite().sum() == 2 * 31


def test_weights_that_are_not_packed() -> None:
    for weight in (torch.ones(4, 3), torch.full((4, 4), 1 + 2**-9), torch.ones(4, 4).half()):
        assert atom_ops.pack_linear_weight(weight) is weight


def test_inputs_of_other_shapes_and_types(dtype: torch.dtype) -> None:
    x, weight, bias = layer(3, 32, 64, dtype)
    packed = atom_ops.pack_linear_weight(weight)
    apart = torch.cat((x, x), dim=1)[:, :64]
    assert torch.equal(atom_ops.linear(apart, packed), atom_ops.linear(x, packed))
    wrong: tuple[tuple[torch.Tensor, torch.Tensor | None], ...] = (
        (x.double(), None), (x[:, :62], None), (x, bias.double()), (x, bias[:16]),
    )  # fmt: skip
    for given, added in wrong:
        with pytest.raises(TypeError, match="x is .*, the weight "):
            atom_ops.linear(given, packed, added)


@pytest.mark.parametrize("rows", [1, 9, 70])
def test_fused_linear_layers_have_the_bits_of_their_parts(rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = layer(rows, 80, 576, dtype)
    packed, norm = atom_ops.pack_linear_weight(weight), torch.rand(576).to(dtype)
    normed, total = atom_ops.add_rms_norm(x, x.flip(0), norm, 1e-6)
    found = atom_ops.add_norm_linear(x, x.flip(0), norm, 1e-6, packed, bias)
    assert torch.equal(found[0], atom_ops.linear(normed, packed, bias)) and torch.equal(found[1], total)
    first, same = atom_ops.add_norm_linear(x, None, norm, 1e-6, packed)
    assert same is x and torch.equal(first, atom_ops.linear(atom_ops.rms_norm(x, norm, 1e-6), packed))
    gate_up = torch.cat((x, x.flip(0)), dim=1)
    gated = atom_ops.linear(atom_ops.silu_and_mul(gate_up), packed, bias)
    assert torch.equal(atom_ops.silu_and_mul_linear(gate_up, packed, bias), gated)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 50, 8), (64, 4133, 64), (70, 1000, 4200)])
def test_the_largest_outputs_are_those_of_the_linear_layer(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(rows, inputs).to(dtype), torch.randn(outputs, inputs).bfloat16().to(dtype)
    x[-1] = torch.nan
    packed = atom_ops.pack_linear_weight(weight)
    if not isinstance(packed, atom_ops.PackedPanels):
        pytest.skip("torch multiplies bfloat16 on this CPU")
    linear_argmax = REGISTRY["linear_argmax"].providers["native"].function
    found = linear_argmax(x, packed)
    wanted = atom_ops.linear(x, packed, None, torch.float32)
    assert found[:-1].tolist() == [row.index(max(row)) for row in wanted[:-1].tolist()]
    assert 0 <= found[-1] < outputs
    everywhere = linear_argmax(-torch.ones_like(x), atom_ops.pack_linear_weight(torch.ones_like(weight)))
    assert not everywhere.any()  # not the zeros after the last output
