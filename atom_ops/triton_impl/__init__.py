"""Kernels in Triton: one source for AMD and NVIDIA GPUs.

Each module registers the provider `triton` for the op file of the same name. Only these modules
import triton, and only `load` imports them, so triton is optional. Providers allocate nothing but
results and workspaces and never synchronise, so that graphs can capture them.
"""

from importlib.util import find_spec


def load() -> None:
    """Register the providers if triton is installed; later calls do nothing."""
    if find_spec("triton") is None:
        return
    import atom_ops.triton_impl.attention.attention
    import atom_ops.triton_impl.attention.block_rows
    import atom_ops.triton_impl.attention.fused_attention
    import atom_ops.triton_impl.attention.kv_cache
    import atom_ops.triton_impl.attention.kv_indices
    import atom_ops.triton_impl.attention.partial_attention
    import atom_ops.triton_impl.attention.prompt_attention
    import atom_ops.triton_impl.attention.qkv
    import atom_ops.triton_impl.attention.rotary
    import atom_ops.triton_impl.attention.wide_norms
    import atom_ops.triton_impl.elementwise.activation
    import atom_ops.triton_impl.elementwise.embedding
    import atom_ops.triton_impl.elementwise.hyper_connection
    import atom_ops.triton_impl.elementwise.norm
    import atom_ops.triton_impl.experts.expert_slots
    import atom_ops.triton_impl.experts.experts
    import atom_ops.triton_impl.experts.routing
    import atom_ops.triton_impl.latent.compressed_rows
    import atom_ops.triton_impl.latent.index_keys
    import atom_ops.triton_impl.latent.latent_attention
    import atom_ops.triton_impl.latent.latent_cache
    import atom_ops.triton_impl.latent.latent_heads
    import atom_ops.triton_impl.latent.sparse_attention
    import atom_ops.triton_impl.linear.batch_invariant
    import atom_ops.triton_impl.linear.fused_linear
    import atom_ops.triton_impl.linear.linear
    import atom_ops.triton_impl.recurrent.causal_conv
    import atom_ops.triton_impl.recurrent.gated_delta_rule
    import atom_ops.triton_impl.recurrent.kimi_delta_attention
    import atom_ops.triton_impl.sampling.decode_inputs
    import atom_ops.triton_impl.sampling.draft_inputs
    import atom_ops.triton_impl.sampling.logits_processors
    import atom_ops.triton_impl.sampling.logprobs
    import atom_ops.triton_impl.sampling.ngram
    import atom_ops.triton_impl.sampling.sampling
    import atom_ops.triton_impl.sampling.sharded_argmax
    import atom_ops.triton_impl.sampling.suffix
    import atom_ops.triton_impl.sampling.token_bitmask
    import atom_ops.triton_impl.sampling.verification  # noqa: F401
