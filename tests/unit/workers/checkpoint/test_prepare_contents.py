"""Each row of the table in docs/use/models.md, on a directory that is built for it."""

import re
from pathlib import Path

import pytest

from atom.shared.config.model import ModelConfig
from tests.helpers.checkpoints.checkpoint_contents import CONTENTS, Content, save_base
from workers.checkpoint.prepare import prepare


@pytest.mark.parametrize("row", CONTENTS, ids=lambda row: f"{row.kind}: {row.holds}")
def test_a_directory_becomes_what_the_table_says(tmp_path: Path, row: Content) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    save_base(directory)
    row.change(directory)
    model = ModelConfig(model=str(directory))
    if isinstance(row.shows, str):
        with pytest.raises(ValueError, match=re.escape(row.shows)):
            prepare(model, tmp_path / "cache", lambda *progress: None)
        return
    assert row.shows(prepare(model, tmp_path / "cache", lambda *progress: None))
