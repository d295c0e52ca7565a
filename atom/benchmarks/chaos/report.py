"""What became of the streams of a scenario."""

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from atom.benchmarks.chaos.streams import ClientStream

__all__ = ["OverloadFigures", "Report", "judge", "judge_overload"]

BOUNDS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
_EXPECTED = ("200", "429", "poison engine_dead")
_MOST_GROWTH = 50 << 20
_LEAST_GOODPUT = 0.9
_MOST_RECOVERY_S = 5.0
_MOST_WASTED = 0.01
_ROUNDING = "only --dtype float32 (small models) and --batch-invariant (GPUs) keep them equal"


class OverloadFigures(msgspec.Struct):
    """What a server gave under too many requests."""

    peak: float
    """Requests per second without them."""
    goodput: float
    """Requests per second whose tokens were generated meanwhile, without those of `wasted_tokens`."""
    recovery_s: float
    """From the end of the overload to the next request that was served."""
    tokens: int
    """Generated for the requests of the overload."""
    wasted_tokens: int
    """Those of requests that were not served."""
    in_progress_bytes: int
    """Resident memory that the frontends gained in the first half, until all places were taken."""


class Report(msgspec.Struct, kw_only=True):
    """The figures of one scenario."""

    scenario: str
    requirement: str
    summary: str
    streams: int
    tokens: int
    failed: int
    """Streams that did not get to their end."""
    differing: int
    """Complete streams with other ids than in the undisturbed run."""
    resumptions: int
    pauses: list[int]
    """By `BOUNDS_S`, and above: streams whose longest pause after an event was so long."""
    median_pause_s: float | None
    longest_pause_s: float | None
    grown_bytes: int
    """Resident memory that the frontends have gained."""
    outcomes: dict[str, int]
    """Requests of a flood, by status; how a request has ended that ends engines."""
    problems: list[str]
    overload: OverloadFigures | None = None

    def text(self) -> str:
        """Some lines for people."""
        result = "FAILED" if self.problems else "passed"
        lines = [
            f"{self.scenario} ({self.requirement}, {self.summary}): {result}",
            f"  {self.streams} streams, {self.tokens} tokens, {self.failed} failed, "
            f"{self.differing} with other ids, {self.resumptions} resumptions",
        ]
        if self.median_pause_s is not None:
            lines.append(
                f"  longest pause of a stream after an event: median {self.median_pause_s:.2f} s, "
                f"at most {self.longest_pause_s:.2f} s"
            )
            names = [f"<= {bound:g} s" for bound in BOUNDS_S] + [f"> {BOUNDS_S[-1]:g} s"]
            most = max(self.pauses)
            for name, count in zip(names, self.pauses, strict=True):
                if count:
                    lines.append(f"  {name:>9} {count:6} {'#' * max(1, 40 * count // most)}")
        if (figures := self.overload) is not None:
            lines.append(
                f"  {figures.goodput:.1f} requests/s served under overload, {figures.peak:.1f} at the peak; "
                f"{figures.wasted_tokens} of {figures.tokens} tokens wasted; "
                f"served again {figures.recovery_s:.1f} s after it; memory of the frontends: "
                f"{figures.in_progress_bytes / 2**20:+.0f} MiB in the first half, "
                f"{self.grown_bytes / 2**20:+.0f} MiB in the second"
            )
        if self.outcomes:
            lines.append(
                f"  requests: {', '.join(f'{n} x {name}' for name, n in sorted(self.outcomes.items()))}"
            )
        return "\n".join([*lines, *(f"  problem: {problem}" for problem in self.problems)])


def judge_overload(
    name: tuple[str, str, str], figures: OverloadFigures, outcomes: dict[str, int], grown_bytes: int
) -> Report:
    """The report of an overload; `name` as for `judge`."""
    report = judge(name, [], [], [0.0], grown_bytes, outcomes)
    report.overload = figures
    if figures.goodput < _LEAST_GOODPUT * figures.peak:
        share = f"{figures.goodput:.1f} of {figures.peak:.1f} requests/s"
        report.problems.append(f"only {share} were served under overload")
    if figures.wasted_tokens > _MOST_WASTED * figures.tokens:
        share = f"{figures.wasted_tokens} of {figures.tokens} tokens"
        report.problems.append(f"{share} were computed for requests that were not served")
    if figures.recovery_s > _MOST_RECOVERY_S:
        report.problems.append(f"a request was served only {figures.recovery_s:.1f} s after the overload")
    if not outcomes.get("429"):
        report.problems.append("no request was refused: this was no overload")
    return report


def judge(
    name: tuple[str, str, str],
    undisturbed: Sequence[ClientStream],
    streams: Sequence[ClientStream],
    event_times: Sequence[float],
    grown_bytes: int = 0,
    outcomes: dict[str, int] | None = None,
) -> Report:
    """The report of a scenario; `name` has its name, requirement and summary."""
    failed = [stream for stream in streams if stream.error]
    pairs = zip(undisturbed, streams, strict=True)
    differing = sum(not one.error and one.ids != before.ids for before, one in pairs)
    found = [stream.pause(at) for stream in streams for at in event_times]
    pauses = sorted(pause for pause in found if pause is not None)
    buckets = [0] * (len(BOUNDS_S) + 1)
    for pause in pauses:
        buckets[bisect_left(BOUNDS_S, pause)] += 1
    bad = {each: n for each, n in (outcomes or {}).items() if each not in _EXPECTED}
    problems = [f"the undisturbed run failed: {one.error}" for one in undisturbed if one.error][:1]
    problems += sorted({f"a stream failed: {stream.error}" for stream in failed})[:5]
    if differing:
        problems.append(f"{differing} streams got other tokens than undisturbed ones; {_ROUNDING}")
    problems += [] if event_times else ["no event took place: the streams are too short"]
    problems += [f"{n} requests ended with: {each}" for each, n in bad.items()]
    if grown_bytes > _MOST_GROWTH:
        problems.append(f"the frontends have grown by {grown_bytes >> 20} MiB")
    return Report(
        scenario=name[0],
        requirement=name[1],
        summary=name[2],
        streams=len(streams),
        tokens=sum(len(stream.ids) for stream in streams),
        failed=len(failed),
        differing=differing,
        resumptions=sum(stream.resumptions for stream in streams),
        pauses=buckets,
        median_pause_s=pauses[len(pauses) // 2] if pauses else None,
        longest_pause_s=pauses[-1] if pauses else None,
        grown_bytes=grown_bytes,
        outcomes=outcomes or {},
        problems=problems,
    )
