"""The server is looked for before anything is prepared."""

import socket

import pytest

from atom.benchmarks import benchmark_serving
from atom.benchmarks.serving.errors import BenchmarkError
from atom.benchmarks.serving.run import check_server
from tests.helpers.servers.ports import kept_port


def test_a_server_that_listens_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        check_server(f"http://127.0.0.1:{server.getsockname()[1]}/base")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://127.0.0.1", "http://", "http://127.0.0.1:x"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(BenchmarkError, match="--base-url"):
        check_server(url)


def test_a_closed_port_is_named_before_a_tokenizer_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark_serving, "text_source", lambda args: pytest.fail("too late"))
    with kept_port() as port:
        assert benchmark_serving.main(["--model", "owner/name", "--port", str(port)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: no server answers at http://") and f":{port}: Connection refused" in line
