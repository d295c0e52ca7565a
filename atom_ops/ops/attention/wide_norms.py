"""RMS norms of a token's queries, and of its keys, over all heads: ranks share the sums of their heads.

T tokens, O features of a fused QKV projection: queries, keys, values.
"""

import torch
from torch import Tensor

from atom_ops.op import Case, op


def _qkv(tokens: int, queries: int, keys: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(tokens, queries + 2 * keys, generator=generator).to(dtype)


def _squares_case(tokens: int, queries: int, keys: int, repeated: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor | int, ...]:
        return _qkv(tokens, queries, keys, dtype, generator), queries, keys, repeated

    return Case(f"{tokens}x{queries}+{keys}-{repeated}", make)


@op([_squares_case(1, 128, 32, 0), _squares_case(7, 48, 24, 8), _squares_case(33, 6144, 1024, 1024)])
def query_key_squares(qkv_TO: Tensor, queries: int, keys: int, repeated: int) -> Tensor:
    """Sums of squares of a token's queries and of its keys, float32 [T, 2].

    `queries` and `keys` count features; the first `repeated` of the keys are in another rank's sum.
    """
    q_TQ, k_TK, _ = qkv_TO.float().tensor_split([queries, queries + keys], 1)
    return torch.stack((q_TQ.square().sum(1), k_TK[:, repeated:].square().sum(1)), 1)


def _normalised_case(tokens: int, queries: int, keys: int, ranks: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> tuple[Tensor | int | float | None, ...]:
        weights = torch.rand(2, max(queries, keys), generator=generator).to(dtype)
        squares = torch.rand(tokens, 2, generator=generator) * 2 * ranks * queries if ranks > 1 else None
        qkv = _qkv(tokens, queries, keys, dtype, generator)
        return qkv, squares, weights[0, :queries], weights[1, :keys], ranks * queries, ranks * keys, 1e-5

    return Case(f"{tokens}x{queries}+{keys} of {ranks}", make)


@op(
    [
        _normalised_case(1, 128, 32, 1),
        _normalised_case(5, 40, 80, 1),
        _normalised_case(7, 48, 24, 2),
        _normalised_case(33, 6144, 1024, 2),
    ]
)
def normalised_queries_keys(
    qkv_TO: Tensor,
    squares_T2: Tensor | None,
    query_weight_Q: Tensor,
    key_weight_K: Tensor,
    all_queries: int,
    all_keys: int,
    eps: float,
) -> Tensor:
    """The projection [T, O] with normalised queries and keys, computed in float32 and rounded once.

    `squares_T2` has the sums of squares over all ranks, of `all_queries` and `all_keys` features; None: the
    projection has all of them.
    """
    queries, keys = len(query_weight_Q), len(key_weight_K)
    q_TQ, k_TK, v_TV = qkv_TO.tensor_split([queries, queries + keys], 1)
    if squares_T2 is None:
        squares_T2 = query_key_squares.reference(qkv_TO, queries, keys, 0)
    q_T1, k_T1 = squares_T2.split(1, 1)
    normed_TQ = q_TQ.float() * (q_T1 / all_queries + eps).rsqrt() * query_weight_Q.float()
    normed_TK = k_TK.float() * (k_T1 / all_keys + eps).rsqrt() * key_weight_K.float()
    return torch.cat((normed_TQ.to(qkv_TO.dtype), normed_TK.to(qkv_TO.dtype), v_TV), 1)
