"""The model of one rank and the specs of its KV cache: for a worker, and on the meta device for a plan."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.device import COMPILERS
from atom.shared.config.engine import EngineConfig
from atom.shared.config.eplb import eplb_config
from atom.shared.config.online_quantization import online_quantization
from atom.shared.messages.worker import KVSpec
from atom.shared.utils import envs
from parallel.expert import ExpertDispatch, LocalDispatch, expert_dispatch
from parallel.mesh import Mesh
from workers.checkpoint.draft import draft_checkpoint
from workers.layers.attention.cache_groups import CacheGroup, LatentGroup, StateGroup
from workers.layers.causal_lm import CausalLM
from workers.layers.context import BuildContext
from workers.layers.moe.moe import MoE
from workers.layers.moe.second_stream import SecondStream
from workers.layers.mtp import PredictingModel
from workers.memory.kv_cache import kv_dtype, kv_specs
from workers.models.registry import build_model
from workers.spec_decode.draft_model import attach
from workers.spec_decode.hidden_states import build_reader
from workers.spec_decode.methods import method_of

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def compute_dtype(config: EngineConfig) -> torch.dtype:
    """The dtype of a resolved configuration."""
    return _DTYPES[config.model.dtype]


def longest_sequence(config: EngineConfig, checkpoint: Checkpoint) -> int:
    """Tokens of the longest sequence, before the size of the KV cache is known."""
    return config.model.max_model_len or checkpoint.max_model_len


def build_rank(
    config: EngineConfig, checkpoint: Checkpoint, mesh: Mesh, dispatch: ExpertDispatch
) -> CausalLM:
    """The rank's model without its weights, on the mesh's device; call `backend.resolve` first.

    Raises ValueError for a model, or a split of one, that is not supported.
    """
    dtype = compute_dtype(config)
    in_one_part = config.device.level in COMPILERS or config.speculative.reads_hidden_states
    build = BuildContext(
        dtype,
        mesh.device,
        mesh.tp,
        longest_sequence(config, checkpoint),
        dcp=mesh.dcp,
        block_size=config.cache.block_size,
        kv_dtype=kv_dtype(config.cache, dtype),
        dispatch=dispatch,
        redundant_experts=_redundant_experts(config),
        second_stream=None if config.device.level in COMPILERS else _second_stream(mesh.device, dispatch),
        overlap_tokens=0 if in_one_part else envs.ATOM_OVERLAP_ALLREDUCE_TOKENS,
        mtp=config.speculative.method == "mtp",
    )
    if not config.speculative.reads_images:  # none come
        checkpoint = replace(checkpoint, images=None)
    model = build_model(checkpoint, build, online_quantization(config.model.online_quant_config))
    _check_cache_split(model.kv_groups, checkpoint.model_type, mesh)
    own = draft_checkpoint(config.speculative, checkpoint, config.model.load_dummy)
    if own is not None:
        _attach_draft(model, own, build, config)
        _check_cache_split(model.kv_groups, f"--draft-model {own.directory}", mesh)
    if (drafts := config.speculative.num_speculative_tokens) > 0:
        model.kv_groups = [_with_places(group, 1 + drafts) for group in model.kv_groups]
    return model


def _check_cache_split(groups: Sequence[CacheGroup], name: str, mesh: Mesh) -> None:
    """Raise ValueError if the dcp ranks cannot split the cache of a model, or of its draft model, `name`."""
    if mesh.dcp.size > 1 and not all(isinstance(group, LatentGroup) for group in groups):
        raise ValueError(
            f"--decode-context-parallel-size {mesh.dcp.size}: {name} has layers without "
            "MLA, whose cache is not split by tokens; omit the flag"
        )


def _with_places(group: CacheGroup, places: int) -> CacheGroup:
    return replace(group, places=places) if isinstance(group, StateGroup) else group


def _attach_draft(model: CausalLM, own: Checkpoint, build: BuildContext, config: EngineConfig) -> None:
    """Build the draft model. Raises ValueError for one that cannot draft for the target."""
    # The experts of a draft model stay where they are.
    build = replace(build, overlap_tokens=0, mtp=False, redundant_experts=None)
    if config.speculative.reads_hidden_states:
        attach(model, build_reader(own, model, build, config), own)
    else:
        attach(model, build_model(own, build), own)


def drafts_with_experts(model: CausalLM) -> bool:
    """Whether what drafts for the model has experts, which are spread over ranks as the model's are."""
    drafts: list[torch.nn.Module] = [] if model.draft is None else [model.draft.model]
    if isinstance(model, PredictingModel) and model.mtp is not None:
        drafts.append(model.mtp)
    return any(isinstance(module, MoE) for draft in drafts for module in draft.modules())


def rank_dispatch(config: EngineConfig, mesh: Mesh) -> ExpertDispatch:
    """How the tokens of this rank reach their experts. Raises ValueError for a form that cannot run here."""
    max_tokens = config.scheduler.max_num_batched_tokens
    assert max_tokens is not None, "resolved before any worker starts"
    parallel = config.parallel
    return expert_dispatch(
        mesh,
        parallel.enable_expert_parallel,
        parallel.all2all_backend,
        max_tokens,
        parallel.nnodes,
        torch.device(config.device.device) if mesh.device.type == "meta" else None,
    )


def _redundant_experts(config: EngineConfig) -> int | None:
    eplb = eplb_config(config.parallel)
    return None if eplb is None else eplb.num_redundant_experts


def _second_stream(device: torch.device, dispatch: ExpertDispatch) -> SecondStream | None:
    """None where tokens travel to other ranks: a collective must run alone on the GPU."""
    most_tokens = envs.ATOM_DUAL_STREAM_MOE_TOKEN_THRESHOLD
    if device.type != "cuda" or not most_tokens or not isinstance(dispatch, LocalDispatch):
        return None
    return SecondStream(device, most_tokens)


def rank_specs(config: EngineConfig, model: CausalLM) -> list[KVSpec]:
    """The KV spec of each group, with the memory that speculation needs for each block."""
    dtype = kv_dtype(config.cache, compute_dtype(config))
    specs = kv_specs(model.kv_groups, config.cache.block_size, dtype)
    method = method_of(config.speculative, model)
    return specs if method is None else method.kv_specs(specs)
