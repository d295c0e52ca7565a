"""Workers with drafts, driven step by step: rows join one after another, with one or two steps in flight.

The same on a GPU and, with simulated graphs, on a CPU.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.device import DeviceConfig
from atom.shared.config.parallel import ParallelConfig
from atom.shared.config.speculative import SpeculativeConfig
from atom.shared.messages.engine import LogitsProcessors, Sampling, pack_ids, unpack_ids
from atom.shared.messages.worker import AllocateKV, RecurrentStateSpec
from atom_ops import AttentionPlan
from atom_ops.ops.attention.attention_plan import HostRows
from parallel.mesh import Mesh
from tests.helpers.checkpoints.dflash_models import VARIANTS, DflashModel, save_dflash_model
from tests.helpers.checkpoints.dspark_models import save_dspark_model
from tests.helpers.checkpoints.eagle3_models import save_eagle3_model
from tests.helpers.checkpoints.mtp_models import save_mtp_model_of
from tests.helpers.checkpoints.tiny_models import MAX_MODEL_LEN, engine_config, prompt_of, save_tiny, tiny
from tests.helpers.engine.core_side import GREEDY, CoreSide
from tests.helpers.engine.drafting import save_noisy
from tests.unit.workers.graphs.test_decode_graphs import Rerun
from workers import runner_builder
from workers.graphs import graph_modes
from workers.pending_step import PendingStep
from workers.spec_decode import block_proposer, drafter, methods
from workers.worker import Worker

BLOCKS, BLOCK_SIZE, COUNT = 400, 16, 40
CHUNK = 16
HOT = Sampling(temperature=0.7, top_k=0, top_p=1.0, min_p=0.0, seed=7)
LIMITED = Sampling(temperature=0.7, top_k=30, top_p=0.9, min_p=0.01, seed=7, logprobs=1)
PENALISED = Sampling(
    0.7, 0, 1.0, 0.0, 7, logits_processors=LogitsProcessors(frequency_penalty=0.3, bad_words=[[3], [4, 5]])
)
SETTINGS = {"greedy": GREEDY, "hot": HOT, "limited": LIMITED, "penalised": PENALISED}
PLAIN = SpeculativeConfig()
ONE_RANK = ParallelConfig()
PAIRS = (
    *("mtp deepseek-v3", "mtp glm4-moe", "mtp deepseek-v3.2", "mtp glm-4.7-flash"),
    *("mtp qwen3-next", "mtp qwen3.5", "mtp deepseek-v4"),
    *("eagle3 llama-gqa", "eagle3 deepseek-v3"),
    *("draft_model llama-gqa", "draft_model gpt-oss"),
    *("draft_model qwen3.5", "draft_model kimi-linear", "draft_model-qwen3.5 llama-gqa"),
    *("dflash llama-gqa", "dspark llama-gqa"),
    *("dflash-sliding llama-gqa", "dflash-ahead llama-gqa"),
)
"""A method, and the family of the model; `draft_model` may name another family, which drafts."""
SIMULATED = (
    "mtp glm4-moe",
    "eagle3 llama-gqa",
    "draft_model llama-gqa",
    "draft_model qwen3.5",
    "draft_model-qwen3.5 llama-gqa",
    "dflash llama-gqa",
    "dflash-sliding llama-gqa",
    "dflash-ahead llama-gqa",
    "dspark llama-gqa",
)
"""Those that run with `simulate_gpu`."""


@dataclass(frozen=True)
class Pair:
    """A tiny model and what drafts for it."""

    checkpoint: Checkpoint
    method: SpeculativeConfig

    def drafts(self, count: int) -> SpeculativeConfig:
        """The method with so many drafts in every step."""
        return dataclasses.replace(self.method, num_speculative_tokens=count, spec_decode_adaptive=False)


def save_pair(name: str, directory: Path) -> Pair:
    """One of `PAIRS`, saved in new folders of `directory`."""
    kind, family = name.split()
    method, _, variant = kind.partition("-")
    own, other = directory / "model", directory / "draft"
    other.mkdir(parents=True)
    if method == "mtp":
        return Pair(save_mtp_model_of(family, own).checkpoint, SpeculativeConfig("mtp"))
    if method == "eagle3":
        vocabulary = 140 if family == "llama-gqa" else 150
        saved = save_eagle3_model(tiny(family), own, other, draft_vocab=vocabulary)
        return Pair(saved.checkpoint, SpeculativeConfig("eagle3", draft_model=str(other)))
    if method in ("dflash", "dspark"):
        if method == "dspark":
            drafting: DflashModel = save_dspark_model(tiny(family), own, other)
        else:
            drafting = save_dflash_model(tiny(family), own, other, VARIANTS.get(variant))
        return Pair(drafting.checkpoint, dataclasses.replace(PLAIN, method=method, draft_model=str(other)))
    _, checkpoint = save_tiny(tiny(family), own)
    drafts = SpeculativeConfig("draft_model", draft_model=str(other))
    if variant:
        save_tiny(tiny(variant), other)
        for each in own, other:
            _flatten(each)
        return Pair(checkpoint, drafts)
    save_noisy(own, other)
    return Pair(checkpoint, drafts)


def _flatten(directory: Path) -> None:
    """Make the logits of a saved model small, so that models that have nothing in common sample alike.

    What a sampled token is then depends on the noise, which is the same for both.
    """
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] *= 0.05
    save_file(tensors, path, metadata={"format": "pt"})


class DraftingSteps:
    """A worker in float32, where the tokens do not depend on the shape of a step."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: DeviceConfig,
        mesh: Mesh,
        speculative: SpeculativeConfig = PLAIN,
        parallel: ParallelConfig = ONE_RANK,
    ):
        config = dataclasses.replace(
            engine_config(block_size=BLOCK_SIZE), device=device, speculative=speculative, parallel=parallel
        )
        self.worker = Worker(config, checkpoint, mesh, lambda *progress: None)
        specs = self.worker.load().kv_specs
        self.groups = len(specs)
        self._states = [group for group, spec in enumerate(specs) if isinstance(spec, RecurrentStateSpec)]
        self.worker.allocate(AllocateKV([BLOCKS] * self.groups, MAX_MODEL_LEN))
        self.steps = 0
        """Steps of the last `run`."""
        self.accepted = 0
        self.verified = 0
        """Accepted and verified drafts of all runs."""
        self.samples = 0
        """How often a row of theirs sampled in a step with drafts."""
        self._speculative = speculative

    def run(
        self, sampling: Sampling, in_flight: int = 1, predicted: Sequence[Sequence[int]] = ()
    ) -> list[list[int]]:
        """The first COUNT tokens of each prompt."""
        core = self.core()
        pending: deque[PendingStep] = deque()
        waiting = deque(enumerate(prompts()))
        planned = [0] * len(waiting)
        self.steps = 0
        while True:
            if waiting and self.steps >= 3 * waiting[0][0]:
                row, prompt = waiting.popleft()
                text = pack_ids([*prompt[-3:], *predicted[row]]) if predicted else b""
                core.add(row, prompt, sampling, max_length=len(prompt) + COUNT, prediction_ids=text)
            counts = {
                row: max(1, min(CHUNK, core.known[row] - core.computed[row]))
                for row in core.tokens
                if len(core.generated(row)) + planned[row] < COUNT
            }
            if len(pending) < in_flight and counts:
                batch = core.plan(counts)
                for row in core._sampling_rows:
                    planned[row] += 1
                pending.append(self.worker.execute(batch))
                self.steps += 1
            elif pending:
                for row, _ in core._in_flight[0]:
                    planned[row] -= 1
                self._add_result(core, pending.popleft())
            elif not waiting:
                return [core.generated(row)[:COUNT] for row in range(len(prompts()))]
            else:
                self.steps += 1

    def core(self) -> CoreSide:
        """An empty core for this worker."""
        drafts = self._speculative.num_speculative_tokens
        core = CoreSide(BLOCKS, BLOCK_SIZE, groups=self.groups, states=self._states, num_drafts=drafts)
        core.lookahead = self._speculative.lookahead
        core.sends_next_ids = self._speculative.reads_next_ids
        return core

    def _add_result(self, core: CoreSide, step: PendingStep) -> None:
        result = step.result()
        counts = unpack_ids(result.counts)
        self.samples += len(counts)
        self.accepted += sum(count - 1 for count in counts)
        self.verified += sum(unpack_ids(result.num_proposed))
        core.add_result(result)


def prompts() -> list[list[int]]:
    """Prompts of different lengths; half of them repeat a pattern."""
    return [prompt_of(3 + 5 * row, seed=row) if row % 2 else prompt_of(4, seed=row) * 5 for row in range(7)]


MakeSteps = Callable[[Checkpoint, SpeculativeConfig, str], DraftingSteps]
"""Makes a worker with these sizes of graphs."""


def check_pair(
    pair: Pair, make: MakeSteps, sizes: Sequence[str], drafts: Sequence[int], settings: Sequence[str]
) -> None:
    """Raises AssertionError unless the drafts change no token, and some are accepted."""
    plain = make(pair.checkpoint, PLAIN, "[]")
    wanted = {name: plain.run(SETTINGS[name]) for name in settings}
    for count in drafts:
        for each in sizes:
            made = make(pair.checkpoint, pair.drafts(count), each)
            for name in settings:
                for in_flight in (1, 2):
                    found = made.run(SETTINGS[name], in_flight)
                    same = sum(a == b for a, b in zip(found, wanted[name], strict=True))
                    assert same == len(found), (each, count, name, in_flight, same)
            assert made.accepted > 0.01 * made.verified > 2, (each, count, made.accepted, made.verified)


def check_repeated(
    made: DraftingSteps, sampling: Sampling, in_flight: int, wanted: Sequence[Sequence[int]]
) -> None:
    """Raises AssertionError unless all requests have these tokens, in fewer steps when they come again."""
    assert made.run(sampling, in_flight) == wanted
    accepted, samples = made.accepted, made.samples
    assert made.run(sampling, in_flight) == wanted
    tokens_a_step = 1 + (made.accepted - accepted) / (made.samples - samples)
    assert tokens_a_step > max(1.5, 1 + accepted / samples), tokens_a_step


def simulate_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers on the CPU whose host does not know what was accepted, with graphs that run again.

    Not for MLA, whose torch functions need the padding of a step on the host.
    """
    proposers = (drafter, "ModelProposer"), (block_proposer, "BlockProposer"), (methods, "SuffixProposer")
    for module, name in ((runner_builder, "InputBatch"), *proposers):
        monkeypatch.setattr(module, name, partial(getattr(module, name), exact=False))
    monkeypatch.setattr(graph_modes, "CallRecorder", Rerun)
    made = AttentionPlan._made

    def made_from_tensors(plan: AttentionPlan, key: Any) -> Any:
        """Only kernels for paged caches read the tensors; torch's attention gets their values."""
        if plan.host is not None and plan.host.exact:
            return made(plan, key)
        query_lens = plan.query_starts_R1.diff().int().numpy()
        contexts = np.maximum(plan.context_lens_R.numpy(), query_lens)
        table = plan.block_table_RW.numpy()
        ahead = None if plan.ahead_T is None else plan.ahead_T.numpy()
        return made(dataclasses.replace(plan, host=HostRows(query_lens, contexts, table, ahead=ahead)), key)

    monkeypatch.setattr(AttentionPlan, "_made", made_from_tensors)
