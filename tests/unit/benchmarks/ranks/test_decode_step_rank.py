"""The kernels that the benchmark of a decode step lists, from events of torch's profiler."""

from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from benchmarks.ranks.decode_step_rank import Kernel, kernels_of


def event(name: str, begin_us: float, end_us: float, stream: int = 7, **more: object) -> FunctionEvent:
    fields = {"device_type": DeviceType.CUDA, "device_index": 0, "device_resource_id": stream, **more}
    return FunctionEvent(id=0, name=name, thread=0, start_us=begin_us, end_us=end_us, **fields)


def test_kernels_that_overlap_count_once() -> None:
    events = [
        event("range", 0.0, 100.0, is_user_annotation=True),
        event("launch", 0.0, 100.0, device_type=DeviceType.CPU),
        event("gemm", 28.0, 45.0),
        event("Memcpy DtoD", 0.0, 4.0),
        event("norm", 0.0, 10.0),
        event("gemm", 2.0, 30.0),
        event("norm", 70.0, 72.0),
        event("inside", 5.0, 25.0),
        event("inside", 60.0, 61.0),
        event("expert", 30.0, 50.0, stream=8),
        event("expert", 0.0, 40.0, stream=8),
    ]
    assert kernels_of(events, steps=2) == [
        Kernel("expert", 1, 25.0),
        Kernel("gemm", 1, 17.5),
        Kernel("norm", 1, 4.0),
        Kernel("inside", 1, 0.5),
    ]
