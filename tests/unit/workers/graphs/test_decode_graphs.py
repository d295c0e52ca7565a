"""Steps of captured graphs, compared with the same steps without graphs."""

import random
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, cast

import pytest
import torch

from atom.shared.messages.engine import Sampling, unpack_ids
from atom.shared.messages.worker import NewRow
from atom_ops import StatePlan
from tests.helpers.engine.core_side import GREEDY, CoreSide
from workers.batch.block_table import BatchLimits, BlockTable
from workers.batch.group_rows import GroupRows
from workers.batch.input_batch import InputBatch
from workers.batch.state_slots import StateSlots
from workers.graphs import prompt_graphs
from workers.graphs.decode_graphs import DecodeGraphs
from workers.graphs.prompt_graphs import PromptGraphs
from workers.layers.causal_lm import CausalLM
from workers.layers.context import CacheLayer, ForwardContext
from workers.memory.memory_guard import MemoryGuard
from workers.model_runner import Graphs, ModelRunner
from workers.sampling.sampler import Sampler

CPU = torch.device("cpu")
LIMITS = BatchLimits(max_rows=6, max_model_len=64, block_size=4)
VOCAB = 97
NOT_COMPUTED = 5


def tables() -> list[GroupRows]:
    """Two groups of blocks, one of states."""
    return [BlockTable(LIMITS), StateSlots(LIMITS), BlockTable(LIMITS)]


class Footprint:
    """A fake model whose logits depend on all inputs of each row."""

    def __call__(self, ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        total_T = ids_T * 7 + positions_T * 3
        for number, group in enumerate(ctx.groups):
            if isinstance(group, StatePlan):
                assert group.num_tokens == len(ids_T)
                of_row = 13 * group.slots_R + 17 * group.fresh_R
                total_T = total_T + of_row[group.row_T]
                continue
            plan = group.plan
            lengths = plan.query_starts_R1.diff()
            rows_T = torch.arange(len(lengths)).repeat_interleave(lengths)
            rows_T = torch.cat((rows_T, rows_T.new_zeros(len(ids_T) - len(rows_T))))  # padding
            used = (plan.context_lens_R + LIMITS.block_size - 1) // LIMITS.block_size
            inside = torch.arange(plan.block_table_RW.shape[1]) < used[:, None]
            of_row = (plan.block_table_RW * inside).sum(1) + 11 * plan.context_lens_R
            total_T = total_T + (number + 2) * (group.slots_T + of_row[rows_T])
        return total_T[:, None].float()

    sample = CausalLM.sample

    def compute_logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(hidden_RD[:, 0].long() % VOCAB, VOCAB).float() * 9


class Rerun:
    """A recorder without graphs: a replay runs the function again and writes the same tensors."""

    runs_first = True

    def __call__(self, body: Callable[[], Any], name: str) -> tuple[Callable[[], object], Any]:
        first = body()
        for result in tensors(first):
            result.fill_(NOT_COMPUTED)

        def replay() -> None:
            for old, new in zip(tensors(first), tensors(body()), strict=True):
                old.copy_(new)

        return replay, first


def tensors(value: Any) -> list[torch.Tensor]:
    """Those that a body computes: neither caches, nor query starts, which are the same in each step."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list):
        return [tensor for each in value for tensor in tensors(each)]
    if not is_dataclass(value):
        return []
    names = [field.name for field in fields(value) if field.name not in ("kv_layers", "query_starts_R1")]
    return [tensor for name in names for tensor in tensors(getattr(value, name))]


def runner(
    sizes: list[int] | None, model: object | None = None, kv_layers: Sequence[CacheLayer] = ()
) -> ModelRunner:
    model = cast(CausalLM, model or Footprint())
    inputs = InputBatch(LIMITS, tables(), CPU)
    memory = MemoryGuard(CPU, num_ranks=1)
    sampler = Sampler(LIMITS, VOCAB, CPU, memory)
    if sizes is None:
        return ModelRunner(model, kv_layers, inputs, sampler, memory, lambda: None)
    graphs = DecodeGraphs(model, kv_layers, inputs, sizes, Rerun(), CPU)
    prompts = PromptGraphs(model, kv_layers, inputs, [3, 8, 20], Rerun(), CPU)
    for captured in (graphs, prompts):
        captured.capture(lambda: None)
    return ModelRunner(model, kv_layers, inputs, sampler, memory, lambda: None, Graphs([graphs], prompts))


class TwoGroups(CoreSide):
    """Both groups use the same blocks; a new row's state takes another slot than the last one's."""

    def plan(self, counts: dict[int, int]) -> Any:
        batch = super().plan(counts)
        for change in (*batch.new_rows, *batch.more_blocks):
            is_new = isinstance(change, NewRow)
            change.block_ids.append([7 * batch.step + change.row] if is_new else [])
            change.block_ids.append([block + 1 for block in change.block_ids[0]])
        return batch


@pytest.mark.parametrize("sizes", [[1, 2, 4, 6], [4], [1]])
def test_changing_batches_get_the_same_tokens(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows join, decode, pause and leave at random; rows are reused with other blocks."""
    monkeypatch.setattr(prompt_graphs, "_ROW_SIZES", (2, 4))
    source = random.Random(5)
    eager, captured = runner(None), runner(sizes)
    core = TwoGroups(4000, LIMITS.block_size)
    steps = 0
    while steps < 150:
        counts = {}
        for row in source.sample(range(LIMITS.max_rows), source.randrange(1, LIMITS.max_rows + 1)):
            if row not in core.tokens or (len(core.tokens[row]) > 50 or source.random() < 0.02):
                prompt = [source.randrange(VOCAB) for _ in range(source.randrange(1, 20))]
                core.add(row, prompt, source.choice([GREEDY, GREEDY, sampling(steps), biased()]))
            counts[row] = min(max(core.known[row] - core.computed[row], 1), source.choice([1, 5, 20]))
        for _ in range(source.choice([1, 1, 6])):
            batch = core.plan(counts)
            ids = captured.launch(batch).result().token_ids
            assert ids == eager.launch(batch).result().token_ids
            core.add_sampled(ids)
            steps += 1
            if any(core.computed[row] < core.known[row] or len(core.tokens[row]) > 60 for row in counts):
                break
            counts = dict.fromkeys(counts, 1)
    assert captured._graphs.decode[0]._size > 0
    assert captured._inputs.device_rows.positions_N[LIMITS.padding_row] == -1


def sampling(seed: int) -> Sampling:
    return Sampling(temperature=2.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed)


def biased() -> Sampling:
    return Sampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, logprobs=2)


def test_padding_changes_nothing() -> None:
    one = runner([6])
    core = TwoGroups(100, LIMITS.block_size)
    core.add(3, [5, 6, 7])
    core.add_sampled(one.launch(core.plan({3: 3})).result().token_ids)
    for _ in range(10):
        core.add_sampled(one.launch(core.plan({3: 1})).result().token_ids)
    rows = one._inputs.device_rows
    assert rows.positions_N.tolist() == [-1, -1, -1, 13, -1, -1, -1]
    assert rows.ids_N[3] == core.tokens[3][-1]
    assert len(unpack_ids(one.launch(core.plan({3: 1})).result().token_ids)) == 1
