"""The GPU benchmark's results: one JSON file for each model, written anew after every row.

Rows of one file were all measured under the same settings; a start under others is refused, so
that a table never mixes them.
"""

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from atom.benchmarks.gpu_rows import Measured


class SettingsError(ValueError):
    """Results of other settings are in the way; one line that says what to do."""


class Entry(msgspec.Struct, frozen=True):
    """One measured row. `value` is in the row's unit, times are in seconds."""

    value: float
    measured: str
    """Date, UTC."""
    seconds: list[float] = []
    prompt_seconds: list[float] = []


class Settings(msgspec.Struct, frozen=True):
    """What the figures depend on."""

    hardware: str
    software: str
    options: dict[str, Any]
    """Engine options by field name, the model apart."""
    shrink: int = 1
    """Requests and lengths were divided by it; the figures mean nothing unless it is 1."""


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
        """None when nothing was measured; SettingsError for a file that is not ours."""
        if not self.path.exists():
            return None
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=Content)
        except msgspec.DecodeError as error:
            raise SettingsError(f"{self.path} holds no results of this benchmark: {error}") from None

    def check_options(self, options: dict[str, Any], shrink: int) -> None:
        """Raise SettingsError when what is there was measured with other options."""
        content = self.read()
        if content is None or (content.settings.options, content.settings.shrink) == (options, shrink):
            return
        raise SettingsError(self._other("options", content.settings.options, options))

    def add(self, settings: Settings, name: str, measured: Measured) -> None:
        """Write one row beside those that are there; raises SettingsError for other settings."""
        content = self.read() or Content(settings)
        for field in ("hardware", "software", "options", "shrink"):
            there, here = getattr(content.settings, field), getattr(settings, field)
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

    def forget(self, names: set[str]) -> None:
        """Drop these rows; the file goes with its last one."""
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
            "choose another folder with --results, or measure every row anew with --fresh"
        )
