"""What a dead frontend leaves of its streams, and who may take it."""

import asyncio
import errno
import os
import signal
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from atom.shared.messages.codec import encode
from atom.shared.messages.engine import AddRequest, FinishReason, Sampling, pack_ids
from atom.shared.messages.resume import (
    Claimed,
    ClaimedRequest,
    ClaimedSequence,
    EndedSequence,
    Resumable,
)
from atom.shared.messages.supervisor import EngineEnded
from frontend.engine_client import resumption, stream_files
from frontend.engine_client.client import EngineClient
from frontend.engine_client.resumption import ResumedStream
from frontend.engine_client.sequence import RunningSequence, claimed_requests
from frontend.engine_client.stream_files import StreamFiles, StreamHeldError
from frontend.engine_client.streams import Stream
from frontend.errors import RequestError, UnavailableError
from frontend.text.output_processor import OutputProcessor, SequenceOutput, TextOptions
from tests.helpers.servers.fake_core import Script
from tests.helpers.servers.fake_engines import Start, connected, read, start, until

__all__ = ["start"]

SAMPLING = Sampling(0.7, 0, 1.0, 0.0, 11)


def request(ids: list[int], key: str = "k", max_tokens: int = 50) -> AddRequest:
    resumable = Resumable(key, b"form", ids[0], len(ids))
    return AddRequest(ids, pack_ids([1, 2]), max_tokens, SAMPLING, tenant="t", resumable=resumable)


def begun(key: str = "k") -> Claimed:
    """Sequences 7, with an id, and 8."""
    sequences = [ClaimedSequence(7, pack_ids([3])), ClaimedSequence(8, b"")]
    return Claimed(0, key, [ClaimedRequest(encode(request([7, 8], key)), sequences)])


def update(number: int, ids: list[int], reason: str | None = None) -> SequenceOutput:
    return SequenceOutput(number, array("i", ids), finished=reason is not None, reason=reason)


def take(files: StreamFiles, key: str = "k", tenant: str = "t") -> Claimed | None:
    """What a frontend finds that dies then."""
    found = asyncio.run(files.take(key, tenant))
    if found is None:
        return None
    os.close(found[1]._descriptor)
    return found[0]


@contextmanager
def another_frontend(files: StreamFiles, *updates: SequenceOutput) -> Iterator[None]:
    """It has the stream `k` for the block, and dies."""
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        file = files.begin(begun())
        assert file is not None
        for each in updates:
            file.add(each)
        os.write(writer, b"x")
        time.sleep(600)
    with os.fdopen(reader), os.fdopen(writer):
        os.read(reader, 1)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_a_dead_frontend_leaves_what_it_has_written(tmp_path: Path) -> None:
    files = StreamFiles(tmp_path / "streams")
    updates = update(7, [4, 5]), update(8, [6]), update(7, [9], "eos"), update(8, [7])
    with another_frontend(files, *updates):
        with pytest.raises(StreamHeldError):
            take(files)
        assert take(files, tenant="another") is None and files.left() == []
    assert take(files, tenant="another") is None
    found = take(files)
    assert found is not None
    assert found.ended == [EndedSequence(7, pack_ids([3, 4, 5, 9]), int(FinishReason.EOS))]
    (part,) = found.requests
    assert part.request == encode(request([7, 8]))
    assert part.sequences == [ClaimedSequence(8, pack_ids([6, 7]))]


def test_a_frame_that_was_cut_off_is_as_none(tmp_path: Path) -> None:
    files = StreamFiles(tmp_path)
    with another_frontend(files, update(8, [6])):
        pass
    path = tmp_path / "k"
    whole = path.read_bytes()
    with another_frontend(files, update(8, [6]), update(8, [7])):
        pass
    for size in reversed(range(len(whole), path.stat().st_size)):
        os.truncate(path, size)
        found = take(files)
        assert found is not None and found.requests[0].sequences[1].output_ids == pack_ids([6])


def test_a_stream_that_has_ended_or_failed_leaves_nothing(tmp_path: Path) -> None:
    files = StreamFiles(tmp_path)
    file = files.begin(begun())
    assert file is not None
    assert (tmp_path / "k").stat().st_mode & 0o777 == 0o600
    file.remove()
    file.remove()
    assert list(tmp_path.iterdir()) == []
    with another_frontend(files, update(7, [4]), update(7, [], "aborted")):
        pass
    assert take(files) is None


def test_the_file_of_a_stream_that_moves_is_its_new_frontends(tmp_path: Path) -> None:
    files = StreamFiles(tmp_path)
    with another_frontend(files, update(8, [6])):
        file = files.begin(begun())
        assert file is not None
        file.add(update(8, [5]))
    with pytest.raises(StreamHeldError):  # its new frontend lives
        take(files)
    assert files.left() == []
    earlier = files.begin(begun("other"))
    latest = files.begin(begun("other"))
    assert earlier is not None and latest is not None
    earlier.remove()
    assert (tmp_path / "other").exists()
    latest.remove()
    file.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_nobody_takes_is_removed_after_the_grace(tmp_path: Path, start: Start) -> None:
    directory = tmp_path / "streams"
    files = StreamFiles(directory)
    with another_frontend(files):
        pass
    assert [path.name for path, _ in files.left()] == ["k"]

    async def run() -> None:
        async with connected([start(0)], orphan_grace=0.2, stream_dir=str(tmp_path / "streams")):
            await until(lambda: not (directory / "k").exists())

    asyncio.run(run())


def test_a_disk_without_room_costs_the_file_alone(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("frontend.engine_client.stream_files.os.write", lambda fd, frame: len(frame) - 1)

    async def run() -> list[int]:
        async with connected([start(0)], orphan_grace=30.0, stream_dir=str(tmp_path / "streams")) as client:
            (number,) = client.new_ids(1)
            async with client.open([request([number])], TextOptions()) as stream:
                found = await read(stream)
            async with client.open([request(client.new_ids(1))], TextOptions()) as stream:
                return found + await read(stream)

    assert len(asyncio.run(run())) == 80
    (text,) = caplog.messages  # once a minute, for however many streams
    assert "the disk is full" in text and list((tmp_path / "streams").iterdir()) == []


def test_a_directory_without_locks_costs_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(stream_files.fcntl, "flock", no_locks)
    before = os.listdir("/proc/self/fd")
    assert StreamFiles(tmp_path).begin(begun()) is None
    assert os.listdir("/proc/self/fd") == before and not list(tmp_path.iterdir())


def test_a_stream_with_a_large_request_has_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = StreamFiles(tmp_path)
    monkeypatch.setattr(stream_files, "MOST_BYTES", len(begun().requests[0].request) - 1)
    assert files.begin(begun()) is None and list(tmp_path.iterdir()) == []


def test_a_file_that_is_left_is_taken_again_or_removed(tmp_path: Path) -> None:
    files = StreamFiles(tmp_path)
    file = files.begin(begun())
    assert file is not None
    left = file.leave()
    file.remove()
    assert take(files) is not None
    files.remove([left])
    assert list(tmp_path.iterdir()) == []


def test_a_request_is_written_once_for_all_of_its_sequences() -> None:
    one, other = request([1, 2]), request([3], "other")
    output, stream = OutputProcessor(None), cast(Stream, None)
    sequences = [
        RunningSequence.adopted(
            ClaimedSequence(number, b""), each, output.new_state(each, TextOptions()), stream
        )
        for number, each in ((1, one), (2, one), (3, other))
    ]
    found = claimed_requests(sequences)
    assert [part.request for part in found] == [encode(one), encode(other)]
    assert [[each.request_id for each in part.sequences] for part in found] == [[1, 2], [3]]


def test_a_stream_goes_on_where_its_dead_frontend_was(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine has died, too; another frontend asks the next life to go on."""
    part, script = Script(list(range(100)), None), Script(list(range(200)), FinishReason.MAX_TOKENS)
    old, new = start(0, script=lambda _: part), start(0, life=1, script=lambda _: script)
    directory = tmp_path / "streams"
    settings: dict[str, Any] = {"orphan_grace": 30.0, "stream_dir": str(directory), "max_replays": 3}
    monkeypatch.setattr(resumption, "_HELD_S", 0.3)

    async def resume(client: EngineClient, tenant: str = "t") -> list[int]:
        async with client.open_resumed(await client.resumption.resume("k", tenant)) as stream:
            return await read(stream)

    async def silent(resumed: ResumedStream) -> bool:
        return False

    async def run() -> None:
        async with connected([old], **settings) as dying, connected([new], index=1, **settings) as client:
            (number,) = dying.new_ids(1)
            async with dying.open([request([number], max_tokens=200)], TextOptions()) as stream:
                await until(lambda: stream.last_token_at > stream.first_token_at)
                dying.set_engines([], [EngineEnded(0, 0, "killed")])
                emitted = dying._sequences[number].state.emitted
                with pytest.raises(UnavailableError, match="an earlier connection has not ended yet"):
                    await resume(client)
                with pytest.raises(RequestError, match="unknown"):
                    await resume(client, "another")
                assert stream.file is not None
                os.close(stream.file._descriptor)  # as the kernel does
                stream.file = None
                with pytest.raises(RequestError, match="unknown"):
                    await resume(client, "another")
                with monkeypatch.context() as patch, pytest.raises(RequestError, match="unknown"):
                    patch.setattr(client.resumption, "_claim", silent)
                    patch.setattr(client.resumption, "grace_s", 0.3)
                    await resume(client)  # an engine that does not answer may have the stream
                assert await resume(client) == list(range(200))
                assert new.requests[-1].prompt_ids == pack_ids([1, 2]) + emitted.tobytes()
                assert list(directory.iterdir()) == []
            dying.resumption.close()

    asyncio.run(run())


def test_a_stream_is_waited_for_while_its_earlier_connection_ends(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for its turn at the next life of its engine, so that no engine can say where it is."""
    part = Script(list(range(100)), None)
    old, new = start(0, script=lambda _: part), start(0, life=1)
    settings: dict[str, Any] = {
        "orphan_grace": 30.0,
        "stream_dir": str(tmp_path / "streams"),
        "max_replays": 3,
    }

    async def run() -> None:
        async with connected([old], **settings) as client, connected([new], index=1, **settings) as other:
            (number,) = client.new_ids(1)
            asked = request([number], max_tokens=200)
            async with client.open([asked], TextOptions()) as stream:
                await until(lambda: stream.first_token_at)
                client.set_engines([], [EngineEnded(0, 0, "killed")])
                at_other = asyncio.create_task(other.resumption.resume("k", "t"))
                monkeypatch.setattr(type(client.engines), "up", {0: True})
                monkeypatch.setattr(client.resumption, "_lost_at", 0.0)
                here = asyncio.create_task(client.resumption.resume("k", "t"))
                await asyncio.sleep(0.5)
                assert not here.done() and not at_other.done()
            resumed = await here
            assert resumed.stream is stream and stream.open == {number}
            client._close(stream)
            with pytest.raises(RequestError, match="unknown"):
                await at_other

    asyncio.run(run())
