"""Names of steps in traces.

decode[bs=8 tok=8 d=8]               8 decode rows
prefill[bs=2 tok=300 ctx=[200,100]]  2 prompt chunks; ctx: tokens of each prompt computed after the step
prefill[bs=9 tok=308 ctx=[300] d=8]  a mixed step: one prompt chunk, 8 decode rows
"""

from atom.shared.messages.worker import ScheduledBatch

_MAX_CONTEXTS = 16


def step_label(batch: ScheduledBatch, lengths: list[tuple[int, int]]) -> str:
    """`lengths` holds (computed tokens, tokens to prefill) of each row, before the step."""
    counts = batch.counts or [1] * len(batch.rows)
    size = f"bs={len(counts)} tok={sum(counts)}"
    rows = zip(counts, lengths, strict=True)
    contexts = [computed + count for count, (computed, prefill) in rows if computed < prefill]
    decodes = len(counts) - len(contexts)
    if not contexts:
        return f"decode[{size} d={decodes}]"
    shown = ",".join(map(str, contexts[:_MAX_CONTEXTS]))
    rest = ",…" if len(contexts) > _MAX_CONTEXTS else ""
    return f"prefill[{size} ctx=[{shown}{rest}]" + (f" d={decodes}]" if decodes else "]")
