"""The limit of open files."""

import resource

import pytest

from atom.shared.utils.open_files import OpenFilesError, raise_open_files_limit


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What was set; the test process's own limits stay."""
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: made.append(both))
    return made


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 4096), [(4096, 4096)]),
        ((1024, 1 << 20), [(65536, 1 << 20)]),
        ((1024, resource.RLIM_INFINITY), [(65536, resource.RLIM_INFINITY)]),
        ((100_000, 1 << 20), []),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), []),
    ],
)
def test_the_soft_limit_is_raised(
    monkeypatch: pytest.MonkeyPatch,
    limits: list[tuple[int, int]],
    before: tuple[int, int],
    after: list[tuple[int, int]],
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: before)
    raise_open_files_limit()
    assert limits == after


def test_too_low_a_hard_limit_is_an_error(
    monkeypatch: pytest.MonkeyPatch, limits: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 100))
    with pytest.raises(OpenFilesError, match="only 100 files may be open"):
        raise_open_files_limit()
