"""`python -m workers.main`: one rank as a process. Started by atom-launch.

torch is imported after the environment of its thread pools is set, so nothing at the top of this
file may import it.
"""

import logging
import os
import signal
import sys
import threading
import time
import traceback

import msgspec
import zmq

from atom.shared.config.engine import EngineConfig
from atom.shared.config.kv_peers import prompt_transfer
from atom.shared.config.kv_transfer import reads_peers
from atom.shared.messages.codec import Decoder, encode
from atom.shared.messages.launch import WorkerLaunch
from atom.shared.messages.supervisor import LAST_REPORT_MS, Dead, Progress
from atom.shared.messages.worker import ToWorker, WorkerFailed, WorkerHeartbeat
from atom.shared.utils import envs
from atom.shared.utils.endpoint import connect
from atom.shared.utils.errors import disk_full, disk_full_line, one_line, out_of_memory
from atom.shared.utils.exit_status import ExitStatus
from atom.shared.utils.install_check import check_install
from atom.shared.utils.liveness import HeartbeatSender, heartbeat_interval
from atom.shared.utils.logger import setup_logging
from atom.shared.utils.process import read_launch
from atom.shared.utils.stack_dump import dump_stacks_on_signal
from atom.shared.utils.step_trace import StepTrace
from workers.memory.heap import heap_use
from workers.waves import Waves

_CORE_LINGER_MS = 2000
_PROGRESS_INTERVAL_S = 0.05
_SPIN_COUNT = "10000"
_KERNEL_CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")  # of torch, of oneDNN
_CACHED_KERNELS = "256"
_COLLECTIVES = ("gloo", "NCCL", "DistBackendError")


def main() -> None:
    """Exit status 0 after Shutdown or SIGTERM, 1 after a failure that was reported."""
    check_install()
    launch = read_launch(WorkerLaunch)
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(0))
    _set_thread_environment(launch.config)
    _set_kernel_cache_environment(launch.config)
    _set_profiler_environment(launch.config)
    _set_store_environment(launch)
    _set_transfer_environment(launch.config)
    setup_logging(launch.label, launch.config.observability.log_level, launch.describes)
    dump_stacks_on_signal(launch.supervisor, launch.label)
    link = Link(launch)
    status = 0
    try:
        _work(launch, link)
    except Exception as error:  # of any kind: core and supervisor need the cause
        if envs.ATOM_LOG_MORE:
            traceback.print_exc()
        lack = out_of_memory(error) or disk_full_line(error, envs.ATOM_CACHE_DIR)
        reason = lack or _lost_rank(error) or one_line(error, ValueError)
        link.fail(reason, _status(error))
        status = 1
    finally:
        link.close()
    if launch.config.device.device == "cuda":
        # Without the destructors of NCCL's groups: they may wait for captured graphs, or for a lost rank.
        logging.shutdown()
        os._exit(status)
    sys.exit(status)


class Link:
    """The worker's sockets: to its engine core, the supervisor and other workers, and for heartbeats."""

    def __init__(self, launch: WorkerLaunch):
        self._rank = launch.rank
        self._name = launch.label
        self._shows_progress = launch.rank == launch.data_parallel_rank == 0
        self._context = zmq.Context()
        self._core = self._context.socket(zmq.DEALER)
        self._core.setsockopt(zmq.IDENTITY, launch.rank.to_bytes(4, "little"))
        self._supervisor = self._context.socket(zmq.PUSH)
        self._core.setsockopt(zmq.LINGER, _CORE_LINGER_MS)  # it may have ended
        self._supervisor.setsockopt(zmq.LINGER, LAST_REPORT_MS)
        for socket, endpoint in ((self._core, launch.core), (self._supervisor, launch.supervisor)):
            connect(socket, endpoint)
        self.waves: Waves | None = None
        """None unless engines step together."""
        self._poller = zmq.Poller()
        self._poller.register(self._core, zmq.POLLIN)
        if launch.waves:
            self.waves = Waves(self._context, launch.waves, _world_rank(launch))
            self._poller.register(self.waves.socket, zmq.POLLIN)
        self._decoder: Decoder[ToWorker] = Decoder(ToWorker)
        self._next_progress = 0.0
        self._closing = threading.Event()
        interval = heartbeat_interval(launch.config.reliability.hang_timeout)
        self._heartbeats = HeartbeatSender(
            self._context, zmq.DEALER, launch.core, lambda: WorkerHeartbeat(launch.rank, heap_use()), interval
        )
        self._heartbeat_thread = threading.Thread(
            target=self._send_heartbeats, args=(interval,), name="heartbeats", daemon=True
        )
        self._heartbeat_thread.start()

    def send(self, message: msgspec.Struct) -> None:
        self._core.send(encode(message))

    def receive(self, timeout_ms: int) -> ToWorker | None:
        """The core's next message; None after the timeout, or earlier when another rank begins a wave."""
        ready = dict(self._poller.poll(timeout_ms))
        if self.waves is not None and self.waves.socket in ready:
            self.waves.receive()
        return self._decoder.decode(self._core.recv()) if self._core in ready else None

    def progress(self, phase: str, done: int, total: int) -> None:
        """Send progress to the supervisor, from one worker alone and at most 20 times a second."""
        now = time.monotonic()
        if self._shows_progress and (done == total or now >= self._next_progress):
            self._next_progress = now + _PROGRESS_INTERVAL_S
            self._supervisor.send(encode(Progress(self._name, phase, done, total)))

    def fail(self, reason: str, status: ExitStatus) -> None:
        self.send(WorkerFailed(self._rank, reason))
        self._supervisor.send(encode(Dead(self._name, reason, status)))

    def close(self) -> None:
        """Close the sockets once the last messages are sent."""
        self._closing.set()
        self._heartbeat_thread.join()
        if self.waves is not None:
            self.waves.close()
        self._context.destroy()

    def _send_heartbeats(self, interval_s: float) -> None:
        """Runs in a separate thread: a step may take minutes, and releases the GIL meanwhile."""
        while not self._closing.wait(interval_s):
            self._heartbeats.send_if_due()
        self._heartbeats.close()


def _work(launch: WorkerLaunch, link: Link) -> None:
    from parallel.mesh import MeshShape, join_mesh
    from workers.step_loop import LockstepLoop, StepLoop
    from workers.worker import Worker, worker_device

    config = launch.config
    rank = launch.rank
    parallel = launch.config.parallel
    shape = MeshShape(
        parallel.tensor_parallel_size,
        parallel.engines_in_mesh,
        dcp=parallel.decode_context_parallel_size,
    )
    mesh = join_mesh(
        shape,
        _world_rank(launch),
        launch.rendezvous,
        worker_device(config, launch.device_index),
        config.reliability.step_timeout,
    )
    worker = Worker(config, launch.checkpoint, mesh, link.progress)
    link.send(worker.load())
    trace = StepTrace(config.observability.step_trace, f"worker-{rank}")
    try:
        if link.waves is None:
            StepLoop(worker, link, rank, trace).run()
        else:
            LockstepLoop(worker, link, rank, trace, link.waves).run()
    finally:
        trace.close()
        worker.close()
        if worker.traces is not None:
            worker.traces.close()
    mesh.close()


def _world_rank(launch: WorkerLaunch) -> int:
    """The rank in the mesh: of all engines in lockstep, or of this engine alone."""
    engine = launch.data_parallel_rank if launch.config.parallel.lockstep else 0
    return launch.config.parallel.world_rank(engine, launch.rank)


def _set_thread_environment(config: EngineConfig) -> None:
    """The number of OpenMP threads, and how long they spin between two operators.

    Without spinning a quarter of the speed is lost; long spinning takes CPU time from the core, the
    frontend and clients. With more threads than cores, spinning is off. Values that the user's
    environment sets are kept.
    """
    if config.device.device != "cpu":
        return
    cores = len(os.sched_getaffinity(0))
    workers = config.parallel.workers_per_node
    threads = config.device.cpu_threads or max(1, cores // workers)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if threads * workers > cores:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    elif "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)


def _set_kernel_cache_environment(config: EngineConfig) -> None:
    """Bound the kernels that torch and oneDNN cache, one for each weight shape and number of tokens.

    By default each caches 1024, of up to half a megabyte: a worker would grow by hundreds of megabytes
    as steps of new sizes come, and fragment its heap. Compiling one again takes about a millisecond.
    """
    if config.device.device == "cpu":
        for cache in _KERNEL_CACHES:
            os.environ.setdefault(cache, _CACHED_KERNELS)


def _set_profiler_environment(config: EngineConfig) -> None:
    """Silence the lines that torch's profiler prints at each start and stop.

    And keep CUPTI loaded between recordings: setting it up again fails with captured graphs.
    """
    if config.observability.torch_profiler_dir is not None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        os.environ.setdefault("TEARDOWN_CUPTI", "0")


def _set_store_environment(launch: WorkerLaunch) -> None:
    """Silence torch's warnings where other hosts reach its TCPStore: one for each stranger who connects."""
    if launch.rendezvous is not None and launch.rendezvous.interface != "lo":
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _set_transfer_environment(config: EngineConfig) -> None:
    """Keep UCX, below NIXL, from listening on the network where all readers are on this host."""
    if reads_peers(config.cache) and prompt_transfer(config.cache, config.parallel).is_local:
        os.environ.setdefault("UCX_NET_DEVICES", "lo")


def _lost_rank(error: Exception) -> str:
    """One line if a collective failed, most often for lack of another rank; else empty."""
    text = one_line(error)
    if isinstance(error, RuntimeError) and any(name in text for name in _COLLECTIVES):
        return f"a worker that it computes with has ended, or did not respond ({text:.200})"
    return ""


def _status(error: Exception) -> ExitStatus:
    """A ValueError is about the checkpoint."""
    if out_of_memory(error) or disk_full(error):
        return ExitStatus.RESOURCES
    return ExitStatus.MODEL if isinstance(error, ValueError) else ExitStatus.FAILURE


if __name__ == "__main__":
    main()
