"""vLLM's configuration as ATOM's: the checkpoint, and the context that layers are built in."""

from typing import Any

import torch
from vllm import envs as host_envs
from vllm.distributed.parallel_state import get_tp_group

from atom.plugin import host_checkpoint
from atom.plugin.host_group import HostCommunicator
from atom.shared.config.checkpoint import Checkpoint
from atom.shared.config.online_quantization import OnlineQuantization
from parallel.expert import expert_dispatch
from parallel.mesh import Mesh
from workers.layers.context import BuildContext


def layer_name(layer: int) -> str:
    """The name of an attention layer, by which vLLM gives it a cache."""
    return f"model.layers.{layer}.self_attn.attn"


def index_name(layer: int) -> str:
    """The name of the cache of a layer's index keys."""
    return f"model.layers.{layer}.self_attn.indexer.k_cache"


def check_supported(vllm_config: Any) -> None:
    """Raise ValueError, in one line, for a setting that ATOM's models do not honour."""
    parallel = vllm_config.parallel_config
    model = vllm_config.model_config
    speculative = vllm_config.speculative_config
    method = getattr(speculative, "method", None)
    refused = {
        "--pipeline-parallel-size": parallel.pipeline_parallel_size > 1,
        "--decode-context-parallel-size": parallel.decode_context_parallel_size > 1,
        "--enable-expert-parallel with --data-parallel-size": parallel.enable_expert_parallel
        and parallel.data_parallel_size > 1,
        "--enable-eplb": parallel.enable_eplb,
        "--enable-dbo": parallel.enable_dbo,
        "--enable-lora": vllm_config.lora_config is not None,
        "--enable-prompt-embeds": model.enable_prompt_embeds,
        f"--speculative-config with method {method}": method not in (None, "ngram"),
        f"--runner {model.runner_type}": model.runner_type != "generate",
    }
    if found := [flag for flag, given in refused.items() if given]:
        raise ValueError(
            f"ATOM's models in vLLM do not support {', '.join(found)}: omit it, or set "
            "ATOM_DISABLE_VLLM_PLUGIN=1 to use vLLM's"
        )


def check_graphs(vllm_config: Any) -> None:
    """Raise ValueError where vLLM would capture ATOM's attention of prompts in its graphs.

    Such graphs are interrupted at vLLM's own attention alone. vLLM chooses them for some architectures.
    """
    mode = vllm_config.compilation_config.cudagraph_mode
    if host_envs.VLLM_USE_BREAKABLE_CUDAGRAPH and mode is not None and mode.has_piecewise_cudagraphs():
        raise ValueError(
            "VLLM_USE_BREAKABLE_CUDAGRAPH=1 (vLLM's default for this architecture): its graphs would contain "
            "ATOM's attention of prompts: set it to 0, or ATOM_DISABLE_VLLM_PLUGIN=1 to use vLLM's model"
        )


def checkpoint_of(model_config: Any) -> Checkpoint:
    """The checkpoint of vLLM's model configuration. Raises ValueError for what is not supported."""
    settings = model_config.hf_config.to_dict()
    return host_checkpoint.host_checkpoint(
        str(model_config.model), settings, model_config.architectures, model_config.dtype
    )


def online_quantization_of(vllm_config: Any) -> OnlineQuantization | None:
    """What --additional-config says under online_quant_config. Raises ValueError for other settings."""
    return host_checkpoint.online_quantization_of(vllm_config.additional_config or {}, "--additional-config")


def build_context(vllm_config: Any, device: torch.device) -> BuildContext:
    """The context of this rank's layers, with vLLM's tensor-parallel group."""
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    tp = HostCommunicator(get_tp_group())
    mesh = Mesh(device, tp=tp, ep=tp)
    speculative = vllm_config.speculative_config
    drafts = 0 if speculative is None else speculative.num_speculative_tokens
    return BuildContext(
        model.dtype,
        device,
        tp,
        model.max_model_len + drafts,
        block_size=vllm_config.cache_config.block_size,
        separate_tables=True,
        dispatch=expert_dispatch(mesh, parallel.enable_expert_parallel),
    )
