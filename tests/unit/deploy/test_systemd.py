"""The systemd unit: systemd accepts it, and its timeouts and flags suit the server."""

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from atom.shared.config.cli import (
    CommandLineParser,
    add_engine_args,
    add_server_args,
    all_fields,
    server_config_from,
)
from atom.shared.config.reliability import ReliabilityConfig
from atom.shared.utils import envs
from atom.shared.utils.exit_status import ExitStatus
from tests.helpers.source import ROOT

UNIT = ROOT / "deploy/systemd/atom@.service"


def service() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text())
    return parser["Service"]


def test_the_server_accepts_the_command_line() -> None:
    parser = CommandLineParser()
    add_engine_args(parser)
    add_server_args(parser)
    assert service()["ExecStart"].split() == ["/srv/atom/.venv/bin/atom-launch"]
    set_here = dict(word.split("=", 1) for word in service()["Environment"].split())
    assert set_here["ATOM_HOST"] == "127.0.0.1"
    known = {f"ATOM_{field.name.upper()}" for field in all_fields()} | envs.VARIABLES.keys() | {"HF_HOME"}
    assert set_here.keys() <= known
    server = server_config_from(parser.parse_args(["--model", "some/model"]))
    assert float(service()["TimeoutStopSec"]) > server.shutdown_timeout + 20


def test_the_watchdog_is_slower_than_the_restart_of_an_engine() -> None:
    assert float(service()["WatchdogSec"]) >= ReliabilityConfig().hang_timeout + 20


def test_statuses_that_a_restart_cannot_change_prevent_it() -> None:
    assert service()["RestartPreventExitStatus"].split() == [
        str(int(status)) for status in (ExitStatus.USAGE, ExitStatus.MODEL)
    ]


def test_only_the_supervisor_gets_the_stop_signal() -> None:
    assert service()["KillMode"] == "mixed"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not on this machine")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "atom@.service"
    # verify checks that the program exists.
    unit.write_text(UNIT.read_text().replace("/srv/atom/.venv/bin/atom-launch", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "atom@" not in done.stderr, done.stderr
