"""The steps that need the most memory: run once at start, to measure the memory left for the KV cache."""

from collections.abc import Sequence

from atom.shared.messages.engine import LogitsProcessors, Sampling, pack_ids
from atom.shared.messages.worker import NewRow, ScheduledBatch
from atom.shared.sampling_params import MAX_LOGPROBS
from workers.layers.attention.cache_groups import CacheGroup, StateGroup


def largest_steps(max_tokens: int, max_rows: int, max_model_len: int) -> list[list[int]]:
    """Tokens of each row: many prompts of equal length, and a few long ones next to single tokens.

    Both sample `min(max_rows, max_tokens)` rows. No prompt is longer than `max_model_len - 1`.
    """
    rows = min(max_rows, max_tokens)
    longest = max(min(max_model_len - 1, max_tokens), 1)
    even = [min(max_tokens // rows, longest)] * rows
    left = max_tokens - rows
    uneven = []
    for _ in range(rows):
        more = min(left, longest - 1)
        uneven.append(1 + more)
        left -= more
    return [even] if even == uneven else [even, uneven]


def num_blocks(counts: Sequence[int], groups: Sequence[CacheGroup], block_size: int) -> list[int]:
    """Blocks, or slots, of each group that `profile_batch` needs."""
    blocks = sum(-(-count // block_size) for count in counts)
    return [len(counts) if isinstance(group, StateGroup) else blocks for group in groups]


def profile_batch(
    counts: Sequence[int],
    groups: Sequence[CacheGroup],
    block_size: int,
    vocab_size: int,
    max_model_len: int,
) -> ScheduledBatch:
    """A step of new rows that samples with every parameter and reports all log probabilities.

    The last row is a resumed one of the greatest length, because the longest token record determines
    the memory of all rows' penalties. Its earlier tokens use the blocks of its new ones.
    """
    sampling = _profile_sampling(vocab_size)
    new_rows = []
    first_block = 0
    for row, count in enumerate(counts):
        blocks = list(range(first_block, first_block + -(-count // block_size)))
        first_block += len(blocks)
        num_known = count
        prompt_length = count
        prompt_logprobs = MAX_LOGPROBS
        if row == len(counts) - 1 and max_model_len - 1 > count:
            num_known = max_model_len - 1
            prompt_length = 1
            prompt_logprobs = -1
            blocks = (blocks * -(-num_known // block_size))[: -(-num_known // block_size)]
        block_ids = [[row] if isinstance(group, StateGroup) else blocks for group in groups]
        prompt_ids = pack_ids(range(min(prompt_length, vocab_size)))
        output_ids = pack_ids(token % vocab_size for token in range(num_known - prompt_length))
        new_rows.append(
            NewRow(
                row,
                num_known,
                num_known - count,
                block_ids,
                sampling,
                prompt_length,
                prompt_logprobs,
                prompt_ids,
                output_ids,
            )
        )
    token_ids = pack_ids(token % vocab_size for count in counts for token in range(count))
    return ScheduledBatch(-1, list(range(len(counts))), list(counts), new_rows, token_ids=token_ids)


def _profile_sampling(vocab_size: int) -> Sampling:
    """Every parameter at a value that has an effect; top-k and top-p keep most of the vocabulary."""
    processors = LogitsProcessors(
        bad_words=[[0, 1], [2]],
        min_tokens=1,
        end_ids=[0],
        bias_ids=pack_ids([1]),
        bias_values=[1.0],
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        presence_penalty=0.1,
    )
    return Sampling(
        temperature=1.0,
        top_k=max(vocab_size - 1, 1),
        top_p=0.99,
        min_p=1e-6,
        seed=0,
        logits_processors=processors,
        logprobs=MAX_LOGPROBS,
    )
