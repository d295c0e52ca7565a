"""What a trace calls a step.

decode[bs=8 tok=8 d=8]               every row draws its next token
prefill[bs=2 tok=300 ctx=[200,100]]  pieces of prompts; ctx: how far each of these prompts is then
prefill[bs=9 tok=308 ctx=[300] d=8]  with rows beside that draw their next token
"""

from atom.messages.worker import ScheduledBatch

_MOST_CONTEXTS = 16


def step_label(batch: ScheduledBatch, lengths: list[tuple[int, int]]) -> str:
    """`lengths` holds (computed, known) tokens of each row, before the step."""
    counts = batch.counts or [1] * len(batch.rows)
    size = f"bs={len(counts)} tok={sum(counts)}"
    rows = zip(counts, lengths, strict=True)
    contexts = [computed + count for count, (computed, known) in rows if computed < known]
    decodes = len(counts) - len(contexts)
    if not contexts:
        return f"decode[{size} d={decodes}]"
    shown = ",".join(map(str, contexts[:_MOST_CONTEXTS]))
    rest = ",…" if len(contexts) > _MOST_CONTEXTS else ""
    return f"prefill[{size} ctx=[{shown}{rest}]" + (f" d={decodes}]" if decodes else "]")
