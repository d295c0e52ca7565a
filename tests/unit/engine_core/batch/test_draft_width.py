"""Steps have drafts while these pay, and are tried again after pauses that grow."""

from engine_core.batch.draft_width import DraftWidth


def run(width: DraftWidth, steps: int, rows: int, accepts: float) -> list[int]:
    """Numbers of the steps with drafts, of which a share is accepted."""
    found = []
    for step in range(steps):
        drafts = width.next(rows)
        if drafts:
            found.append(step)
            width.record(rows, round(accepts * drafts * rows))
    return found


def test_drafts_that_pay_stay() -> None:
    assert len(run(DraftWidth(4), 300, 8, 0.5)) == 300


def test_drafts_that_fail_are_tried_again_after_growing_pauses() -> None:
    assert run(DraftWidth(4), 500, 1, 0.0) == [*range(4), *range(68, 72), *range(200, 204), *range(460, 464)]


def test_the_first_step_after_a_pause_may_have_nothing_to_accept() -> None:
    """A model does not draft in a pause: that step says nothing of its drafts."""
    width = DraftWidth(4, drafts_in_pauses=False)
    assert run(width, 68, 1, 0.0) == [*range(4)]
    assert width.next(1) == 4
    width.record(1, 0)
    assert len(run(width, 100, 1, 0.25)) == 100, "a quarter of four drafts pays in a batch of one"
    by_text = DraftWidth(4)
    run(by_text, 68, 100, 0.0)
    assert by_text.next(100) == 4
    by_text.record(100, 0)
    assert len(run(by_text, 100, 100, 0.25)) < 100


def test_a_full_batch_needs_more_acceptance() -> None:
    assert len(run(DraftWidth(4), 100, 8, 0.1)) == 100
    assert len(run(DraftWidth(4), 100, 400, 0.1)) == 8


def test_an_empty_batch_begins_anew() -> None:
    width = DraftWidth(4)
    run(width, 300, 1, 0.0)
    assert width.next(0) == 4
    assert run(width, 5, 1, 0.0) == [0, 1, 2, 3]
