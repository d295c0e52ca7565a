"""A worker without its sockets: start-up, memory, sampling, results."""

import gc
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.engine import EngineConfig
from atom.shared.config.scheduler import SchedulerConfig
from atom.shared.messages.engine import LogitsProcessors, Sampling, unpack_ids
from atom.shared.messages.worker import AllocateKV, FullAttentionSpec, ScheduledBatch
from tests.helpers.checkpoints.tiny_models import (
    MAX_MODEL_LEN,
    VOCAB,
    engine_config,
    place,
    prompt_of,
    save_tiny,
    tiny,
)
from tests.helpers.engine.core_side import CoreSide, generate
from workers.model_runner import ModelRunner
from workers.pending_step import PendingStep
from workers.worker import Worker, worker_device

BLOCKS, BLOCK_SIZE = 64, 4
Progress = list[tuple[str, int, int]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return save_tiny(tiny("llama-gqa"), tmp_path_factory.mktemp("model"))[1]


def worker_of(config: EngineConfig, checkpoint: Checkpoint, progress_calls: Progress | None = None) -> Worker:
    note = (
        (lambda *progress: None)
        if progress_calls is None
        else (lambda *progress: progress_calls.append(progress))
    )
    return Worker(config, checkpoint, place(), note)


def ready(config: EngineConfig, checkpoint: Checkpoint, blocks: int = BLOCKS) -> Worker:
    worker = worker_of(config, checkpoint)
    worker.load()
    worker.allocate(AllocateKV([blocks], MAX_MODEL_LEN))
    return worker


def run(worker: Worker, sampling: Sampling, chunk: int = 16, prompts: int = 3) -> list[list[int]]:
    def execute(batch: ScheduledBatch) -> bytes:
        return worker.execute(batch).result().token_ids

    rows = [prompt_of(10 + 7 * row, row) for row in range(prompts)]
    return generate(CoreSide(BLOCKS, BLOCK_SIZE), execute, rows, 16, chunk, 0, sampling)


def test_loaded_has_the_bytes_of_a_block(checkpoint: Checkpoint) -> None:
    progress_calls: Progress = []
    loaded = worker_of(engine_config(), checkpoint, progress_calls).load()
    # 3 layers x keys and values x 4 tokens x 2 heads x 16 numbers x 4 bytes
    assert loaded.kv_specs == [FullAttentionSpec(BLOCK_SIZE, 3 * 2 * 4 * 2 * 16 * 4)]
    assert loaded.kv_bytes == 1 << 24
    files = Path(checkpoint.directory, "model.safetensors").stat().st_size
    assert 0.9 * files < loaded.weight_bytes <= files
    assert {phase for phase, *_ in progress_calls} == {"Loading weights"}
    assert progress_calls[-1][1] == progress_calls[-1][2] == len(progress_calls)


def test_fp8_keys_and_values_take_little_more_than_a_quarter(checkpoint: Checkpoint) -> None:
    full, small = (
        worker_of(engine_config(), checkpoint),
        worker_of(engine_config(kv_cache_dtype="fp8"), checkpoint),
    )
    bytes_full, bytes_small = (w.load().kv_specs[0].bytes_per_block for w in (full, small))
    assert bytes_small == bytes_full * (16 + 4) // (16 * 4)
    for worker in (full, small):
        worker.allocate(AllocateKV([BLOCKS], MAX_MODEL_LEN))
    greedy = Sampling(0.0, 0, 1.0, 0.0, 0)
    exact, rounded = run(full, greedy), run(small, greedy)
    firsts = [(one[0], two[0]) for one, two in zip(exact, rounded, strict=True)]
    assert sum(one == two for one, two in firsts) >= 2


@pytest.mark.parametrize("blocks", [1, 2, BLOCKS])
def test_warm_up_fits_any_cache(checkpoint: Checkpoint, blocks: int) -> None:
    progress_calls: Progress = []
    worker = worker_of(engine_config(), checkpoint, progress_calls)
    worker.load()
    worker.allocate(AllocateKV([blocks], MAX_MODEL_LEN))
    assert progress_calls[-1][0] == "Warming up" and progress_calls[-1][1] == progress_calls[-1][2]


@pytest.mark.parametrize("most", [1, 6])
def test_warm_up_computes_no_more_tokens_than_a_step(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """What drafts may have room for the hidden states of such a step alone."""
    computed: list[int] = []
    launch = ModelRunner.launch

    def counted(runner: ModelRunner, batch: ScheduledBatch) -> PendingStep:
        computed.append(sum(batch.counts or [1] * len(batch.rows)))
        return launch(runner, batch)

    monkeypatch.setattr(ModelRunner, "launch", counted)
    limits = SchedulerConfig(max_num_batched_tokens=most, max_num_seqs=1)
    ready(replace(engine_config(), scheduler=limits), checkpoint)
    assert computed == [most, 1, 1]


def test_a_result_has_one_id_for_each_sampled_row(checkpoint: Checkpoint) -> None:
    worker = ready(engine_config(), checkpoint)
    core = CoreSide(BLOCKS, BLOCK_SIZE)
    core.add(0, prompt_of(9, 0))
    core.add(1, prompt_of(3, 1))
    counts = ({0: 4, 1: 2}, {0: 5, 1: 1}, {0: 1, 1: 1})
    sampled = []
    for step in counts:
        pending = worker.execute(core.plan(step))
        assert pending.ready()
        sampled.append(len(unpack_ids(pending.result().token_ids)))
    assert sampled == [0, 2, 2]


def test_a_seed_samples_the_same_tokens_in_any_batch(checkpoint: Checkpoint) -> None:
    worker = ready(engine_config(), checkpoint)
    hot = Sampling(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=2**63 + 5)
    batched = run(worker, hot)
    assert run(worker, hot, chunk=3) == batched
    assert run(worker, hot, prompts=1) == batched[:1]
    assert run(worker, replace_sampling(hot, seed=6)) != batched
    assert run(worker, replace_sampling(hot, sequence=1)) != batched
    assert all(0 <= token < VOCAB for ids in batched for token in ids)


def test_top_k_of_one_is_greedy_beside_hot_rows(checkpoint: Checkpoint) -> None:
    worker = ready(engine_config(), checkpoint)
    greedy = run(worker, Sampling(0.0, 0, 1.0, 0.0, 0))
    assert run(worker, Sampling(1.5, 1, 1.0, 0.0, 99)) == greedy
    assert run(worker, Sampling(1.5, 0, 1.0, 0.0, 99)) != greedy


def replace_sampling(sampling: Sampling, **changes: int) -> Sampling:
    fields = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
    return Sampling(**{**fields, **changes})


def test_dummy_weights_start_without_files(checkpoint: Checkpoint, tmp_path: Path) -> None:
    progress_calls: Progress = []
    nowhere = replace(checkpoint, directory=str(tmp_path))
    worker = worker_of(engine_config(load_dummy=True), nowhere, progress_calls)
    worker.load()
    worker.allocate(AllocateKV([BLOCKS], MAX_MODEL_LEN))
    assert all(0 <= token < VOCAB for ids in run(worker, Sampling(0.0, 0, 1.0, 0.0, 0)) for token in ids)
    assert {phase for phase, *_ in progress_calls} == {"Filling weights", "Warming up"}


STEP_PACKAGES = ("atom", "atom_ops", "parallel", "torch", "workers")
"""Where the classes are from whose objects a step makes."""


@pytest.mark.parametrize("name", ["llama-gqa", "gpt-oss", "deepseek-v2-lite", "qwen3-next"])
def test_steps_leave_nothing_to_the_garbage_collector(name: str, tmp_path: Path) -> None:
    """Its collections of old objects are rare: cycles keep their tensors for thousands of steps."""
    saved = save_tiny(tiny(name), tmp_path)[1]
    worker = worker_of(engine_config(), saved)
    specs = worker.load().kv_specs
    worker.allocate(AllocateKV([BLOCKS] * len(specs), MAX_MODEL_LEN))
    processors = LogitsProcessors(repetition_penalty=1.2, bad_words=[[5, 6], [3]])
    samplings = (Sampling(0.0, 0, 1.0, 0.0, 0), Sampling(1.5, 4, 0.9, 0.1, 7, 0, processors, 2))

    def serve() -> None:
        for sampling in samplings:
            core = CoreSide.of_specs(specs, BLOCKS, BLOCK_SIZE)
            prompts = [prompt_of(10 + 7 * row, row) for row in range(3)]
            generate(
                core, lambda batch: worker.execute(batch).result().token_ids, prompts, 16, 7, 0, sampling
            )

    serve()
    gc.collect()
    gc.disable()
    try:
        serve()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds = [type(each) for each in gc.garbage]
        found = Counter(kind.__name__ for kind in kinds if kind.__module__.split(".")[0] in STEP_PACKAGES)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not found


def test_a_config_without_a_needed_field_is_named(checkpoint: Checkpoint) -> None:
    config = {key: value for key, value in checkpoint.hf_config.items() if key != "vocab_size"}
    worker = worker_of(engine_config(), replace(checkpoint, hf_config=config))
    with pytest.raises(ValueError, match=r"config.json of .* lacks 'vocab_size'"):
        worker.load()


def test_groups_and_sizes_must_match(checkpoint: Checkpoint) -> None:
    worker = worker_of(engine_config(), checkpoint)
    worker.load()
    with pytest.raises(ValueError, match="1 KV groups, but 2"):
        worker.allocate(AllocateKV([8, 8], MAX_MODEL_LEN))


def test_the_device_index_is_that_of_the_gpu() -> None:
    config = engine_config()
    assert worker_device(config, 1) == torch.device("cpu")
    on_gpus = replace(config, device=replace(config.device, device="cuda"))
    assert worker_device(on_gpus, 2) == torch.device("cuda:2")
