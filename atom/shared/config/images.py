"""Which images requests may have: --limit-mm-per-prompt and --allowed-media-domains."""

import re
from typing import Any

from atom.shared.config.fields import ConfigError, json_object
from atom.shared.messages.images import MAX_IMAGES

__all__ = ["image_limit", "media_domains"]

_LIMIT = "--limit-mm-per-prompt"
_KINDS = ("image", "video", "audio")
_DOMAINS = "--allowed-media-domains"
_HOST = re.compile(r"(?:[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9])?|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")


def image_limit(text: str | None) -> int:
    """Most images of a prompt, by a JSON object as {"image": 2} or {"image": {"count": 2}}.

    Raises ConfigError.
    """
    limits = {kind: _count(kind, value) for kind, value in json_object(text or "{}").items()}
    for kind in ("video", "audio"):
        if limits.get(kind, 0):
            raise ConfigError(f"{_LIMIT}: {kind} is not supported; set it to 0, or leave it out")
    most = limits.get("image", MAX_IMAGES)
    if most > MAX_IMAGES:
        raise ConfigError(f"{_LIMIT}: a prompt has at most {MAX_IMAGES} images, and image is {most}")
    return most


def _count(kind: str, value: Any) -> int:
    if kind not in _KINDS:
        raise ConfigError(f"{_LIMIT}: {kind:.40} is not supported; use image")
    if isinstance(value, dict):
        if unknown := sorted(value.keys() - {"count"}):
            raise ConfigError(f"{_LIMIT}: {unknown[0]:.40} of {kind} is not supported; give its count alone")
        value = value.get("count")
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{_LIMIT}: {kind} is {value!r:.40}: it must be a number from 0 on")
    return value


def media_domains(text: str | None) -> frozenset[str]:
    """The hosts that images may be fetched from, as host or host:port. Raises ConfigError."""
    found = [name.strip().lower() for name in (text or "").split(",") if name.strip()]
    for name in found:
        if not _HOST.fullmatch(name):
            raise ConfigError(
                f"{_DOMAINS}: {name!r:.60} is not a host: give names such as images.example.org, or "
                "images.example.org:8443 for another port, without scheme, path or wildcard"
            )
    return frozenset(found)
