"""SGLang's configuration as ATOM's: the checkpoint, and the context that layers are built in."""

from typing import Any

import torch
from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view
from sglang.srt.distributed import get_tp_group
from sglang.srt.runtime_context import get_server_args

from atom.plugin.host_checkpoint import host_checkpoint
from atom.plugin.host_group import HostCommunicator
from atom.plugin.sglang.registration import AITER, ATTENTION
from atom.shared.config.checkpoint import Checkpoint
from atom.shared.utils import envs
from parallel.expert import expert_dispatch
from parallel.mesh import Mesh
from parallel.sharding import head_shard
from workers.layers.context import BuildContext

_PADDED = (
    "num_attention_heads",
    "intermediate_size",
    "intermediate_size_mlp",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


def uses_own_attention() -> bool:
    """Whether this server runs ATOM's attention. Raises ValueError if it is for prefills or decodes alone."""
    if envs.ATOM_DISABLE_SGLANG_PLUGIN_ATTENTION:
        return False
    own = {each in (ATTENTION, AITER) for each in attention_backends_of(server_args())}
    if len(own) > 1:
        raise ValueError(
            "--prefill-attention-backend and --decode-attention-backend: ATOM's attention has to be both, "
            "since it has a KV layout of its own"
        )
    return own.pop()


def server_args() -> Any:
    """SGLang's server arguments, with what it chose where none were given."""
    return resolved_view(get_server_args())


def check_supported(args: Any, prefix: str) -> None:
    """Raise ValueError, in one line, for a setting that ATOM's models do not honour.

    `prefix`: the name of this model within a larger one.
    """
    refused = {
        "--pp-size": args.pp_size > 1,
        "--enable-dp-attention": args.enable_dp_attention,
        "--ep-size other than 1 and --tp-size": args.ep_size not in (1, args.tp_size),
        "--enable-eplb": args.enable_eplb,
        "--enable-two-batch-overlap": args.enable_two_batch_overlap,
        "--enable-lora": bool(args.enable_lora),
        f"--speculative-algorithm {args.speculative_algorithm}": args.speculative_algorithm is not None,
        "--is-embedding": args.is_embedding,
        "--enable-memory-saver": args.enable_memory_saver,
        "--enable-hierarchical-cache": args.enable_hierarchical_cache,
        f"--disaggregation-mode {args.disaggregation_mode}": args.disaggregation_mode not in (None, "null"),
        f"a text model within another one ({prefix})": prefix != "",
    }
    if found := [flag for flag, given in refused.items() if given]:
        raise ValueError(
            f"ATOM's models in SGLang do not support {', '.join(found)}: omit it, or set "
            "ATOM_DISABLE_SGLANG_PLUGIN=1 to use SGLang's"
        )


def checkpoint_of(hf_config: Any, architecture: str) -> Checkpoint:
    """The checkpoint of SGLang's server arguments. Raises ValueError for what is not supported."""
    directory = server_args().model_path
    # SGLang builds models with the compute dtype as torch's default.
    dtype = torch.get_default_dtype()
    return host_checkpoint(directory, without_padding(hf_config.to_dict()), [architecture], dtype)


def without_padding(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of config.json, of which SGLang enlarges some on a CPU; it keeps them as original_….

    Raises ValueError where it has added heads, which ATOM's layers do not have.
    """
    found = {name: value for name, value in settings.items() if name.removeprefix("original_") not in _PADDED}
    for name in _PADDED:
        if name in settings:
            found[name] = settings.get(f"original_{name}", settings[name])
    if settings.get("num_attention_heads") != found.get("num_attention_heads"):
        raise ValueError(
            f"--tp-size: SGLang pads the {found['num_attention_heads']} heads of this model on a CPU, and "
            "ATOM's models do not: use a number of ranks that divides its heads and its key heads"
        )
    return found


def build_context(checkpoint: Checkpoint, device: torch.device) -> BuildContext:
    """The context of this rank's layers, with SGLang's tensor-parallel group."""
    args = server_args()
    tp = HostCommunicator(get_tp_group())
    mesh = Mesh(device, tp=tp, ep=tp)
    return BuildContext(
        torch.get_default_dtype(),
        device,
        tp,
        args.context_length or checkpoint.max_model_len,
        block_size=args.page_size,
        separate_tables=True,
        dispatch=expert_dispatch(mesh, args.ep_size > 1),
    )


def query_heads(checkpoint: Checkpoint, context: BuildContext) -> int:
    """Query heads on this rank."""
    config = checkpoint.hf_config
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    return head_shard(heads, kv_heads, context.tp.size, context.tp.rank).q_count
