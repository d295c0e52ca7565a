"""The GPU benchmark's results: one JSON file for each model, written after every row.

All rows of a file have the same settings; measuring with other settings is refused.
"""

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.gpu_runs.gpu_rows import Measured


class SettingsError(ValueError):
    """The file has results of other settings; the message says what to do."""


class Entry(msgspec.Struct, frozen=True):
    """One measured row. `value` is in the row's unit, times are in seconds."""

    value: float
    measured: str
    """Date of the measurement, UTC."""
    seconds: list[float] = []
    prompt_seconds: list[float] = []


class Settings(msgspec.Struct, frozen=True):
    """The settings that the figures depend on."""

    hardware: str
    software: str
    options: dict[str, Any]
    """Engine options by field name, without the model."""
    shrink: int = 1
    """Divisor of requests and lengths; the figures are valid only if it is 1."""


class Content(msgspec.Struct):
    """A results file."""

    settings: Settings
    rows: dict[str, Entry] = {}


@dataclass(frozen=True)
class ResultFile:
    """The results of one model."""

    directory: Path
    model: str

    @property
    def path(self) -> Path:
        return self.directory / f"{self.model}.json"

    def read(self) -> Content | None:
        """The stored results, or None; raises SettingsError for an invalid file."""
        if not self.path.exists():
            return None
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=Content)
        except msgspec.DecodeError as error:
            raise SettingsError(f"{self.path} holds no results of this benchmark: {error}") from None

    def check_options(self, options: dict[str, Any], shrink: int) -> None:
        """Raise SettingsError if the stored results have other options."""
        content = self.read()
        if content is None or (content.settings.options, content.settings.shrink) == (options, shrink):
            return
        raise SettingsError(self._other("options", content.settings.options, options))

    def add(self, settings: Settings, name: str, measured: Measured) -> None:
        """Add one row to the file; raises SettingsError for other settings."""
        content = self.read() or Content(settings)
        for field in ("hardware", "software", "options", "shrink"):
            there = getattr(content.settings, field)
            here = getattr(settings, field)
            if there != here:
                raise SettingsError(self._other(field, there, here))
        content.rows[name] = Entry(
            round(measured.value, 4),
            datetime.datetime.now(datetime.UTC).date().isoformat(),
            [round(value, 4) for value in measured.seconds],
            [round(value, 4) for value in measured.prompt_seconds],
        )
        self.directory.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
        partial.replace(self.path)

    def remove(self, names: set[str]) -> None:
        """Remove these rows, and the file with its last row."""
        if (content := self.read()) is None:
            return
        content.rows = {name: entry for name, entry in content.rows.items() if name not in names}
        if content.rows:
            self.path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
        else:
            self.path.unlink()

    def _other(self, field: str, there: object, here: object) -> str:
        return (
            f"{self.path} was measured with other {field} ({there}, now {here}): "
            "choose another folder with --results, or measure every row again with --fresh"
        )
