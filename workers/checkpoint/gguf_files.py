"""The files of a model in GGUF form: one, or several, which are named NAME-00001-of-00003.gguf and so on.

The first one has the metadata. Each has some of the tensors.
"""

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

__all__ = ["VISION", "first_files", "gguf_in_directory", "gguf_parts", "of_quantization", "part_names"]

_PART = re.compile(r"(.+)-(\d{5})-of-(?!00000)(\d{5})(\.gguf)", re.IGNORECASE)
VISION = "mmproj"
"""What the names of files with vision models have, by convention."""


def part_names(name: str) -> list[str]:
    """The names, or paths, of all files of the model of which `name` is the first.

    Raises ValueError for another one than the first.
    """
    if (found := _PART.fullmatch(name)) is None:
        return [name]
    stem, number, count, suffix = found.groups()
    names = [f"{stem}-{each:05}-of-{count}{suffix}" for each in range(1, int(count) + 1)]
    if number != "00001":
        raise ValueError(
            f"{name} is part {int(number)} of {int(count)} of a model: name the first, {names[0]}"
        )
    return names


def gguf_parts(path: Path) -> list[Path]:
    """All files of the model whose first one is at `path`. Raises ValueError for one that is missing."""
    parts = [path.with_name(name) for name in part_names(path.name)]
    if missing := [part.name for part in parts if not part.exists()]:
        raise ValueError(
            f"{path} is one of {len(parts)} parts of a model, of which {len(missing)} are not there, such as "
            f"{missing[0]}: put all parts into {path.parent}"
        )
    return parts


def first_files(names: Iterable[str]) -> list[str]:
    """One of the names for each model in these: the file, or the first one, which may be missing."""
    models = set[str]()
    for name in names:
        if name.lower().endswith(".gguf") and VISION not in PurePosixPath(name).name.lower():
            models.add(_PART.sub(r"\1-00001-of-\3\4", name))
    return sorted(models)


def gguf_in_directory(directory: Path) -> Path | None:
    """The first file of the only model in it; None without GGUF files.

    Raises ValueError for several models.
    """
    names = first_files(path.name for path in directory.iterdir())
    if len(names) > 1:
        raise ValueError(
            f"{directory} has no config.json but {len(names)} models in GGUF files: give one of them, "
            f"such as {directory / names[0]}"
        )
    return directory / names[0] if names else None


def of_quantization(names: Iterable[str], tag: str) -> list[str]:
    """The first files of the models whose names have the word `tag`, such as Q4_K_M, in any case."""
    word = re.compile(rf"(?:^|[-./]){re.escape(tag)}(?=[-./])", re.IGNORECASE)
    return [name for name in first_files(names) if word.search(name)]
