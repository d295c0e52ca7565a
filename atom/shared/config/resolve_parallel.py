"""Whether the parallel settings fit the checkpoint, and what they become for it."""

from dataclasses import replace

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.eplb import eplb_config
from atom.shared.config.fields import ConfigError
from atom.shared.config.parallel import ParallelConfig
from atom.shared.config.tensor_parallel import check_tensor_parallel

__all__ = ["resolve_parallel"]

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def resolve_parallel(parallel: ParallelConfig, checkpoint: Checkpoint, notes: list[str]) -> ParallelConfig:
    """The settings as they act; adds what the user should know to `notes`.

    Raises ConfigError for sizes that the model cannot be split into.
    """
    parallel = _with_dp_attention(parallel, checkpoint, notes)
    _check_nodes(parallel)
    check_tensor_parallel(parallel.tensor_parallel_size, checkpoint.hf_config)
    _check_context_parallel(parallel, checkpoint)
    if parallel.enable_expert_parallel:
        _check_experts(parallel.num_workers, checkpoint)
    _check_eplb(parallel, checkpoint)
    return parallel


def _with_dp_attention(parallel: ParallelConfig, checkpoint: Checkpoint, notes: list[str]) -> ParallelConfig:
    """With --enable-dp-attention every worker is an engine, and experts are spread over all of them."""
    workers = parallel.num_workers
    if not parallel.enable_dp_attention or workers == 1:
        return parallel
    if _num_experts(checkpoint) == 0:
        raise ConfigError(
            f"--enable-dp-attention: {checkpoint.model_type} has no experts for the engines to share; "
            "use -tp to split the model, or -dp for engines of their own"
        )
    if parallel.decode_context_parallel_size > 1:
        raise ConfigError(
            "--decode-context-parallel-size splits a KV cache over tensor-parallel workers, and "
            "--enable-dp-attention leaves each with its own: omit one of them"
        )
    notes.append(f"--enable-dp-attention: {workers} engines of one worker each, which share the experts")
    return replace(parallel, tensor_parallel_size=1, data_parallel_size=workers, enable_expert_parallel=True)


def _check_nodes(parallel: ParallelConfig) -> None:
    """Every node has as many workers."""
    if parallel.num_workers % parallel.nnodes:
        raise ConfigError(
            f"--nnodes {parallel.nnodes} does not divide the {parallel.num_workers} workers of "
            f"--tensor-parallel-size {parallel.tensor_parallel_size} and --data-parallel-size "
            f"{parallel.data_parallel_size}: every node has as many"
        )


def _check_context_parallel(parallel: ParallelConfig, checkpoint: Checkpoint) -> None:
    size = parallel.decode_context_parallel_size
    ranks = parallel.tensor_parallel_size
    if size == 1:
        return
    flag = f"--decode-context-parallel-size {size}"
    model = checkpoint.hf_config
    if ranks % size:
        raise ConfigError(f"{flag} does not divide --tensor-parallel-size {ranks}")
    if not model.get("kv_lora_rank"):
        raise ConfigError(
            f"{flag}: only MLA has a KV cache that every worker would hold whole; the KV heads of "
            f"{checkpoint.model_type} are split by --tensor-parallel-size: omit the flag"
        )
    if checkpoint.keeps_states:
        raise ConfigError(
            f"{flag}: {checkpoint.model_type} has recurrent layers, whose states are not split by tokens: "
            "omit the flag"
        )
    if model.get("index_topk"):
        raise ConfigError(
            f"{flag}: {checkpoint.model_type} has sparse attention, whose top-k tokens are not split over "
            "workers yet: omit the flag"
        )
    heads = model["num_attention_heads"]
    if heads % ranks:
        raise ConfigError(
            f"{flag}: every worker needs the same number of heads, and --tensor-parallel-size {ranks} does "
            f"not divide the {heads} of the model"
        )


def _check_experts(ranks: int, checkpoint: Checkpoint) -> None:
    experts = _num_experts(checkpoint)
    if experts == 0:
        raise ConfigError(f"--enable-expert-parallel: {checkpoint.model_type} has no experts; omit the flag")
    if ranks > experts:
        raise ConfigError(
            f"--enable-expert-parallel: the model has {experts} experts for {ranks} workers; omit the flag"
        )


def _num_experts(checkpoint: Checkpoint) -> int:
    return max((checkpoint.hf_config.get(name) or 0) for name in _EXPERT_COUNTS)


def _check_eplb(parallel: ParallelConfig, checkpoint: Checkpoint) -> None:
    eplb = eplb_config(parallel)
    if eplb is None:
        return
    ranks = parallel.num_workers
    if not parallel.enable_expert_parallel or ranks == 1:
        raise ConfigError(
            "--enable-eplb moves experts between ranks: use --enable-expert-parallel with several workers"
        )
    experts = _num_experts(checkpoint)
    most = experts * (ranks - 1)
    if eplb.num_redundant_experts > most:
        raise ConfigError(
            f"--eplb-config: num_redundant_experts {eplb.num_redundant_experts}: with {most} every one of "
            f"{ranks} ranks has all {experts} experts"
        )
