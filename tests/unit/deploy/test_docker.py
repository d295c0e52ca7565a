"""The Dockerfiles: what they copy is there, and what the server writes is writable."""

import re

import pytest

from tests.helpers.source import PACKAGES, ROOT

FLAVOURS = sorted(path.stem for path in (ROOT / "deploy" / "docker").glob("*.Dockerfile"))


def instructions(flavour: str) -> list[str]:
    text = (ROOT / "deploy" / "docker" / f"{flavour}.Dockerfile").read_text()
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    return [line for line in lines.replace("\\\n", " ").splitlines() if line]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_context_has_what_is_copied(flavour: str) -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        name for line in instructions(flavour) if line.startswith("COPY") for name in line.split()[1:-1]
    }
    assert copied == sent == set(PACKAGES) | {"constraints.txt", "pyproject.toml", "README.md", "LICENSE"}


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_its_user_can_write_the_caches(flavour: str) -> None:
    """A new volume takes the owner of the image's directory; without one it is root's."""
    lines = instructions(flavour)
    (user,) = (line.split()[1] for line in lines if line.startswith("USER"))
    owner, group = user.split(":")
    made = lines.index(f"RUN install -d -o {owner} -g {group} /cache")
    assert made < lines.index(f"USER {user}")
    (variables,) = (line for line in lines if line.startswith("ENV"))
    written = dict(re.findall(r"(\w+)=(\S+)", variables))
    assert written.keys() >= {"HOME", "ATOM_CACHE_DIR", "HF_HOME"}
    assert all(f"{path}/".startswith("/cache/") for path in written.values())
