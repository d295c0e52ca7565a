"""Bounds of the frames between a core and its workers and frontends.

Whatever requests arrive, a `ScheduledBatch` has at most

    ids to compute      4 bytes for each of max_num_batched_tokens, and for each row (`next_ids`)
    rows                rows, counts, appended blocks and copies of states of max_num_seqs rows
    new rows            MAX_NEW_ROWS_BYTES, or a single row of at most MAX_ROW_BYTES

and its result 1 + num_drafts tokens with log probabilities, or an error, for each row, and log
probabilities of at most MAX_PROMPT_LOGPROB_TOKENS prompt tokens. `check_frames` refuses a configuration
whose frames could exceed `MAX_FRAME_BYTES`; `check_row` refuses a request whose row alone could exceed
MAX_ROW_BYTES.
"""

from atom.shared.messages.codec import MAX_FRAME_BYTES
from atom.shared.sampling_params import MAX_LOGPROBS
from engine_core.requests.request import Request, SharedSettings

MAX_NEW_ROWS_BYTES = 8 * 1024 * 1024
"""A step admits no further request that would make its new rows larger than this."""
MAX_ROW_BYTES = 24 * 1024 * 1024
MAX_PROMPT_LOGPROB_TOKENS = 1 << 15
"""Prompt tokens of one step whose log probabilities are reported."""
MAX_REASON_CHARS = 256
"""Length of the error message of a failed request."""

_INT = 5  # bytes of an integer below 2^32 in msgpack, at most
_ID = 4
_COPY = 4 * _INT
_HEADERS = 128  # of one row: array headers, numbers, empty lists
_LOGPROBS = 8 * (1 + MAX_LOGPROBS) + 4  # of one token: ids, values, rank
_RESULT_TOKEN = _ID + _LOGPROBS + _INT


def max_batch_bytes(max_num_seqs: int, max_num_batched_tokens: int, block_size: int, num_groups: int) -> int:
    """Most bytes of a `ScheduledBatch`."""
    blocks = num_groups * (max_num_batched_tokens // block_size + 2 * max_num_seqs)
    copies = 2 * num_groups * _COPY  # saved and restored states
    rows = max_num_seqs * (3 * _INT + _ID + _HEADERS + num_groups * _INT + copies)
    new_rows = max(MAX_NEW_ROWS_BYTES, MAX_ROW_BYTES)
    return _HEADERS + _ID * max_num_batched_tokens + rows + blocks * _INT + new_rows


def max_result_bytes(max_num_seqs: int, max_num_batched_tokens: int, num_drafts: int = 0) -> int:
    """Most bytes of a `BatchResult` or of the `TokenDeltas` made from it."""
    prompt_logprobs = min(MAX_PROMPT_LOGPROB_TOKENS, max_num_batched_tokens)
    row = max((1 + num_drafts) * _RESULT_TOKEN, 4 * MAX_REASON_CHARS) + 2 * _HEADERS
    return _HEADERS + max_num_seqs * row + prompt_logprobs * _LOGPROBS


def check_frames(
    max_num_seqs: int, max_num_batched_tokens: int, block_size: int, num_groups: int, num_drafts: int = 0
) -> None:
    """Raises ValueError for limits of a step whose frames could be too large."""
    batch = max_batch_bytes(max_num_seqs, max_num_batched_tokens, block_size, num_groups)
    result = max_result_bytes(max_num_seqs, max_num_batched_tokens, num_drafts)
    if max(batch, result) > MAX_FRAME_BYTES:
        raise ValueError(
            f"steps of {max_num_seqs} rows and {max_num_batched_tokens} tokens could take messages of "
            f"{max(batch, result)} bytes, and the limit is {MAX_FRAME_BYTES}: lower --max-num-seqs or "
            "--max-num-batched-tokens"
        )


def row_bytes(settings: SharedSettings, prompt_ids: int, output_ids: int, num_blocks: int) -> int:
    """Most bytes of a `NewRow`; `num_blocks` counts all groups, ids count only if they are sent."""
    ids = prompt_ids * settings.needs_prompt_ids + output_ids * settings.needs_output_ids
    ids += len(settings.prediction_ids) // _ID
    return _HEADERS + settings.sampling_bytes + _INT * num_blocks + _ID * ids


def check_row(settings: SharedSettings, prompt_length: int, block_size: int, num_groups: int) -> None:
    """Raises ValueError for a request whose row would be too large at its full length."""
    total = prompt_length + settings.max_tokens
    num_blocks = num_groups * (-(-total // block_size) + 1)
    size = row_bytes(settings, prompt_length, settings.max_tokens, num_blocks)
    if size > MAX_ROW_BYTES:
        raise ValueError(
            f"with {total} tokens and {settings.sampling_bytes} bytes of sampling parameters the request "
            f"takes {size} bytes in a step, and the limit is {MAX_ROW_BYTES}"
        )


def new_row_bytes(request: Request, block_size: int, num_groups: int) -> int:
    """Most bytes of the `NewRow` that admits a waiting request."""
    num_blocks = num_groups * (-(-request.num_tokens // block_size) + 1)
    num_distinct = request.token_ids.prompt.num_distinct
    return row_bytes(request.settings, num_distinct, request.num_generated, num_blocks)
