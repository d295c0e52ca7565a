"""Images on a GPU: logits of tiny models against transformers, graphs, and a tower of real width."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from atom.shared.config.device import DeviceConfig
from atom.shared.messages.images import KEY_BYTES, LoadImage, PromptImage
from atom.shared.messages.worker import AllocateKV
from atom_ops import backend
from engine_core.requests.images import row_images
from parallel.mesh import Mesh
from tests.helpers.checkpoints.tiny_models import MAX_MODEL_LEN, checkpoint_of, engine_config
from tests.helpers.checkpoints.vision_models import (
    MODELS,
    PROCESSOR,
    Processed,
    build,
    hf_follows,
    hf_logits,
    picture,
    processed,
    prompt,
    save,
)
from tests.helpers.engine.core_side import CoreSide
from tests.helpers.engine.teacher_forcing import forced_logits
from tests.helpers.engine.whole_engine import WholeEngine
from workers import worker as worker_module
from workers.worker import Worker

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
BLOCKS, BLOCK_SIZE, COUNT = 64, 16, 10
LOOK, WHY = [5, 6, 7, 8, 9], [11, 12, 13, 14, 15, 16]


def shown_by(model_type: str) -> list[Processed]:
    """Three images, as the model reads them."""
    return [processed(picture(*size), model_type) for size in ((90, 33), (20, 70), (16, 17))]


WIDE, TALL, SMALL = shown_by("qwen3_vl")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("released"),
]


def make_worker(
    directory: Path, capture_sizes: str = "[]", dtype: str = "float32", load_dummy: bool = False
) -> Worker:
    config = engine_config(block_size=BLOCK_SIZE, dtype=dtype, load_dummy=load_dummy)
    device = DeviceConfig(device="cuda", cudagraph_capture_sizes=capture_sizes)
    config = replace(config, device=device)
    return Worker(config, checkpoint_of(directory), Mesh(GPU), lambda *progress: None)


def logits(worker: Worker, ids: list[int], images: list[PromptImage], counts: list[int]) -> torch.Tensor:
    specs = worker.load().kv_specs
    worker.allocate(AllocateKV([BLOCKS] * len(specs), MAX_MODEL_LEN))
    for image in images:
        worker.load_image(LoadImage(image.key, image.rows, image.columns, image.pixels))
    core = CoreSide.of_specs(specs, BLOCKS, BLOCK_SIZE, seed=3)
    core.add(0, ids, images=row_images(images))
    return forced_logits(worker, core, 0, counts)


@pytest.mark.parametrize("model_type", MODELS)
def test_logits_in_chunks_that_cut_images(model_type: str, tmp_path: Path) -> None:
    model = build(model_type)
    save(model, tmp_path)
    ids, images = prompt(LOOK, WIDE, [9], TALL, SMALL, WHY)
    found = logits(make_worker(tmp_path), ids, images, [10, 7, 30, len(ids) - 47])
    torch.testing.assert_close(found, hf_logits(model, ids, [WIDE, TALL, SMALL]), atol=5e-4, rtol=0)


@pytest.mark.parametrize("model_type", ["gemma3", "kimi_k25"])
def test_logits_of_other_towers(model_type: str, tmp_path: Path) -> None:
    """Chunks end where no image is cut, since the tokens of Gemma's see each other."""
    model = build(model_type)
    save(model, tmp_path)
    shown = shown_by(model_type)
    ids, images = prompt(LOOK, shown[0], [9], *shown[1:], WHY)
    border = images[2].start - 1
    found = logits(make_worker(tmp_path), ids, images, [5, border - 5, len(ids) - border])
    torch.testing.assert_close(found, hf_logits(model, ids, shown), atol=5e-4, rtol=0)


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_5", "gemma3", "kimi_k25"])
def test_graphs(model_type: str, tmp_path: Path) -> None:
    """Rows with images and without decode in one replayed step."""
    model = build(model_type, 2 if model_type == "kimi_k25" else 1)
    save(model, tmp_path)
    groups = 1 + (model_type in ("qwen3_5", "gemma3"))
    engine = WholeEngine(make_worker(tmp_path, "[1,2,4]"), [400] * groups, 64, image_tokens=1 << 10)
    wide, tall, small = shown_by(model_type)
    requests = [(LOOK, wide, WHY), (WHY, LOOK), (small, LOOK, tall)]
    for number, parts in enumerate(requests):
        ids, images = prompt(*parts)
        engine.add(number, ids, COUNT, images=images)
    engine.run()
    for number, parts in enumerate(requests):
        found = engine.outputs[number].token_ids
        shown = [part for part in parts if not isinstance(part, list)]
        assert found == hf_follows(model, prompt(*parts)[0], shown, found)


def test_a_tower_of_real_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3-VL-8B with four layers of text: logits of kernels and of torch ops, and the time of an image."""
    rope = {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_interleaved": True,
        "mrope_section": [24, 20, 20],
    }
    text = {"num_hidden_layers": 4, "num_key_value_heads": 8, "intermediate_size": 12288}
    text |= {"max_position_embeddings": 4096, "dtype": "bfloat16", "rope_parameters": rope}
    config = AutoConfig.for_model("qwen3_vl", text_config=text).to_dict()
    config |= {"architectures": ["Qwen3VLForConditionalGeneration"], "dtype": "bfloat16"}
    config["vision_config"]["out_hidden_size"] = config["text_config"]["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = {"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | sizes))
    rows, columns = 12, 16  # a picture of 384 x 512 pixels
    pixels = torch.randint(0, 256, (rows * columns * 4 * 3 * 16 * 16,), dtype=torch.uint8).numpy().tobytes()
    image = PromptImage(bytes(KEY_BYTES), 3, rows, columns, pixels)
    ids = [7, 8, 9, *[config["image_token_id"]] * (rows * columns), 10, 11, 12, 13]
    found = logits(make_worker(tmp_path, dtype="bfloat16", load_dummy=True), ids, [image], [len(ids)])
    monkeypatch.setattr(
        worker_module, "resolve_ops", lambda device, *model: backend.resolve(device, ["torch"])
    )
    slow = make_worker(tmp_path, dtype="bfloat16", load_dummy=True)
    wanted = logits(slow, ids, [image], [len(ids)])
    times = []
    for number in range(1, 5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        slow.load_image(LoadImage(number.to_bytes(KEY_BYTES, "little"), rows, columns, pixels))
        torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1000)
    print(f"an image of {rows * columns} tokens: {', '.join(f'{each:.1f}' for each in times)} ms")
    assert float((found - wanted).norm() / wanted.norm()) < 0.03
