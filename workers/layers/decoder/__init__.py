"""The decoder that most families share: attention with RoPE, then a gated MLP or experts.

    x ──┬─ norm ─ self_attn ─ (norm) ─┬─ norm ─ mlp ─ (norm) ─┬── …
        └───────────── + ─────────────┴────────── + ──────────┘

Most families have only the norms before the blocks; `LayerNorms` says which ones a family has.

A family passes its `DecoderArgs` to `DecoderLM`, and its own `mlp` or `token_mixers` where it differs:
`blocks.py` has their interfaces. A token mixer is the layer's attention or linear attention. Modules are
named as in checkpoints.

docs/develop/qwen3_in_plain_torch.py is the same model in 60 lines. Its lines are computed here by:

    embedding                                   `VocabEmbedding`
    rotation                                    `RotaryEmbedding`, once for all layers with the same RoPE
    x + mlp, input norm, q, k and v             `SelfAttention.after_norm`, `qkv_proj.after_norm`
    head norms, rotary, attention               `SelfAttention.attend`, an `AttentionBackend`
    o_proj                                      `RowParallelLinear`
    x + self_attention, norm, gate and up       `GatedMLP.after_norm`, `gate_up_proj.after_norm`
    silu(gate) * up, down_proj                  `RowParallelLinear.after_gate`
    last x + mlp, model.norm                    `RMSNorm.add_norm` in `DecoderModel.forward`
    lm_head                                     `LMHead`, for the sampling rows only

Each block receives the norm before it (`after_norm`), because most fuse the sum, the norm and their first
matmul. Its output is a partial sum over the tensor-parallel ranks; the next norm all-reduces it, adds it to
the residual and normalises in one call, as a norm after the block does with the one before the next.
"""
