"""A worker's logits at every position of a given text, not only where it samples."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from atom.shared.config.device import GraphMode
from atom.shared.config.resolve import Dtype
from atom.shared.messages.images import LoadImage, PromptImage
from atom.shared.messages.worker import AllocateKV, ScheduledBatch
from engine_core.requests.images import row_images
from parallel.communicator import Communicator
from parallel.mesh import Mesh
from tests.helpers.checkpoints.tiny_models import MAX_MODEL_LEN, checkpoint_of, engine_config
from tests.helpers.engine.core_side import CoreSide
from workers.worker import Worker

BLOCKS, BLOCK_SIZE = 256, 4


class TinyWorker:
    """A worker with a saved tiny model, on the CPU."""

    def __init__(
        self,
        directory: Path,
        dtype: Dtype = "float32",
        capture_sizes: str = "[]",
        tp: Communicator | None = None,
        expert_parallel: bool = False,
        dcp: Communicator | None = None,
        kv_cache_dtype: str = "auto",
        graph_mode: GraphMode = "FULL",
        level: int = 3,
    ):
        """`capture_sizes`: rows of the decode steps that are captured."""
        tp, dcp = tp or Communicator(), dcp or Communicator()
        config = engine_config(tp.size, BLOCK_SIZE, kv_cache_dtype, dtype=dtype)
        device = replace(
            config.device, cudagraph_capture_sizes=capture_sizes, cudagraph_mode=graph_mode, level=level
        )
        config = replace(config, device=device)
        parallel = replace(config.parallel, enable_expert_parallel=expert_parallel)
        parallel = replace(parallel, decode_context_parallel_size=dcp.size)
        config = replace(config, parallel=parallel)
        mesh = Mesh(torch.device("cpu"), tp, dcp, ep=tp)
        self.worker = Worker(config, checkpoint_of(directory), mesh, lambda *progress: None)
        self.loaded = self.worker.load()
        self._specs = self.loaded.kv_specs
        self.worker.allocate(AllocateKV([BLOCKS] * len(self._specs), MAX_MODEL_LEN))

    def logits_of(self, ids: list[int], images: Sequence[PromptImage], counts: Sequence[int]) -> torch.Tensor:
        """`forced_logits` of a prompt with images."""
        for image in {image.key: image for image in images}.values():
            self.worker.load_image(LoadImage(image.key, image.rows, image.columns, image.pixels))
        core = self.core()
        core.add(0, ids, images=row_images(images))
        return forced_logits(self.worker, core, 0, counts)

    def execute(self, batch: ScheduledBatch) -> bytes:
        return self.worker.execute(batch).result().token_ids

    def core(self) -> CoreSide:
        """A new core side; all blocks are free."""
        return CoreSide.of_specs(self._specs, BLOCKS, self.worker._config.block_tokens)


@torch.inference_mode()
def step_logits(worker: Worker, batch: ScheduledBatch) -> torch.Tensor:
    """Logits [T, V] of every token of one step."""
    runner = worker._runner
    step = runner._inputs.step(runner._inputs.apply(batch))
    return runner._model.compute_logits(runner._compute(step))


def forced_logits(worker: Worker, core: CoreSide, row: int, counts: Iterable[int]) -> torch.Tensor:
    """Logits [T, V] in float32 on the CPU; the row's known tokens are computed in chunks of `counts`."""
    return torch.cat([step_logits(worker, core.plan({row: count})).float().cpu() for count in counts])
