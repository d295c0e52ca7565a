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


def timed_run(width: DraftWidth, steps: int, rows: int, accepts: float, longer: float) -> list[int]:
    """The same, where steps with drafts take `longer` times as long as those without."""
    found = []
    for step in range(steps):
        drafts = width.next(rows)
        if drafts:
            found.append(step)
            width.record(rows, round(accepts * drafts * rows))
        width.measured(rows, drafts, longer if drafts else 1.0)
    return found


def test_drafts_whose_steps_take_longer_than_they_gain_stop() -> None:
    """A model that drafts, or experts: by the estimate both would pay with few rows."""
    pays = timed_run(DraftWidth(3), 1000, 2, 0.5, longer=2.2)
    assert len(pays) == 1000 - 4, "four steps without drafts are compared"
    fails = timed_run(DraftWidth(3), 4000, 2, 0.5, longer=3.0)
    assert len(fails) < 60, "1.5 accepted drafts of a row are worth 1.5 steps"


def test_times_are_compared_again_and_for_each_size_of_the_batch() -> None:
    width = DraftWidth(3)
    assert len(timed_run(width, 6000, 2, 0.5, longer=2.0)) == 6000 - 3 * 4
    assert len(timed_run(width, 1000, 200, 0.5, longer=3.0)) < 60
    assert len(timed_run(width, 1000, 2, 0.5, longer=2.0)) > 900


def test_the_first_step_of_a_kind_is_not_measured() -> None:
    width = DraftWidth(3)
    assert width.next(2) == 3
    width.measured(2, 3, 100.0)
    assert len(timed_run(width, 1000, 2, 0.5, longer=2.0)) > 900
