"""A trace as a page of Markdown: host and device time of each kind of step."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import mean, median

from tools.traces.breakdown import KernelTotal, kernel_totals
from tools.traces.steps import Step

_ORDER = ("prefill", "decode", "draft")
_MOST_KERNELS = 15


def report(title: str, steps: Sequence[Step]) -> str:
    """The report of a trace's steps, by kind: prefill, decode, draft, then others."""
    kinds: dict[str, list[Step]] = defaultdict(list)
    for step in steps:
        kinds[step.kind].append(step)
    ordered = sorted(kinds, key=lambda kind: (_ORDER.index(kind) if kind in _ORDER else len(_ORDER), kind))
    lines = [f"# {title}", "", *_phases({kind: kinds[kind] for kind in ordered})]
    for kind in ordered:
        lines += ["", f"## Kernels of {kind} steps", "", *_kernels(kinds[kind])]
    return "\n".join(lines) + "\n"


def _phases(kinds: dict[str, list[Step]]) -> list[str]:
    lines = [
        "Times in milliseconds. *Step*: its duration on the host. *Kernels*: the sum of its kernels' times, "
        "without their waits for previous kernels.",
        "",
        "| phase | steps | step, mean | median | min | max | all steps | kernels, mean | kernels in all |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind, steps in kinds.items():
        times = [step.duration_ns / 1e6 for step in steps]
        kernels = [step.kernel_ns / 1e6 for step in steps]
        figures = (
            mean(times),
            median(times),
            min(times),
            max(times),
            sum(times),
            mean(kernels),
            sum(kernels),
        )
        lines.append(f"| {kind} | {len(steps)} | " + " | ".join(f"{one:.3f}" for one in figures) + " |")
    return lines


def _kernels(steps: Sequence[Step]) -> list[str]:
    totals = kernel_totals([kernel for step in steps for kernel in step.kernels])
    if not totals:
        return ["None."]
    whole = sum(one.total_us for one in totals)
    rest = totals[_MOST_KERNELS:]
    if rest:
        others = KernelTotal(
            f"{len(rest)} others", sum(one.calls for one in rest), sum(one.total_us for one in rest)
        )
        totals = [*totals[:_MOST_KERNELS], others]
    lines = ["| kernel | calls | total ms | mean µs | share |", "|---|---|---|---|---|"]
    return lines + [_kernel_line(one, whole) for one in totals]


def _kernel_line(one: KernelTotal, whole: float) -> str:
    name = one.kernel.replace("|", "\\|")
    share = one.total_us / whole if whole else 0.0
    mean_us = one.total_us / one.calls
    return f"| {name} | {one.calls} | {one.total_us / 1e3:.3f} | {mean_us:.1f} | {share:.1%} |"
