"""What the tests compiled, for the table of docs/develop/rocm-kernels.md."""

from pathlib import Path

import pytest

from tests.helpers.kernels.kernel_table import COMPILED, table


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--table", type=Path, help="write the registers and memory of each kernel to this file")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    path = config.getoption("--table")
    if path:
        path.write_text(table(COMPILED), encoding="utf-8")
        terminalreporter.write_line(f"{len(COMPILED)} kernels in {path}")
