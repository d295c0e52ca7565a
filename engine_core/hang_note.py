"""What an engine core writes about its last step when its workers hang."""

from atom.shared.messages.admin import RequestStatus
from atom.shared.messages.worker import ScheduledBatch
from engine_core.core import EngineCore

__all__ = ["describe_work"]

_MOST_REQUESTS = 64


def describe_work(core: EngineCore, batch: ScheduledBatch | None) -> str:
    """The last step that was sent, and the requests that have not ended; no text and no token of them."""
    total, requests = core.requests()
    lines = [_step(batch, core.num_in_flight), f"{total} sequences have not ended:"]
    for each in requests[:_MOST_REQUESTS]:
        status = RequestStatus(each.status).name.lower()
        lines.append(
            f"  {each.name or 'a request'}, sequence {each.sequence}: {status}, "
            f"{each.prompt_tokens} prompt tokens, {each.generated_tokens} generated, "
            f"{each.preemptions} preemptions, {each.replays} replays"
        )
    if total > _MOST_REQUESTS:
        lines.append(f"  and {total - _MOST_REQUESTS} more")
    return "\n".join(lines)


def _step(batch: ScheduledBatch | None, num_in_flight: int) -> str:
    if batch is None:
        return "no step was sent to the workers"
    tokens = sum(batch.counts) if batch.counts else len(batch.rows) * (1 + batch.num_drafts)
    new = ", ".join(
        f"row {row.row} with {row.num_known} tokens from {row.computed}"
        for row in batch.new_rows[:_MOST_REQUESTS]
    )
    return (
        f"last step sent: {batch.step}, {num_in_flight} in flight, {len(batch.rows)} rows, {tokens} tokens, "
        f"{batch.num_drafts} drafts a row; rows {batch.rows[:_MOST_REQUESTS]}; "
        f"counts {batch.counts[:_MOST_REQUESTS] or 'one each'}; new: {new or 'none'}"
    )
