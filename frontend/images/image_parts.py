"""Content parts that are images, in OpenAI's form: {"type": "image_url", "image_url": {"url": …}}.

The files come as data: URLs, or are fetched later from hosts that the server allows.
"""

import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atom.shared.messages.images import MAX_FILE_BYTES, MAX_IMAGES
from frontend.errors import RequestError
from frontend.images.image_fetcher import check_url

__all__ = ["IMAGE_URL", "ImageParts", "ImageRules", "ImageSource", "image_part"]

IMAGE_URL = "image_url"
_DATA = re.compile(r"data:(?:image/[\w.+-]+)?(?:;[\w-]+=[\w.-]+)*;base64,", re.IGNORECASE | re.ASCII)
_DETAILS = (None, "auto", "high", "original")
_ROLES = ("user", "tool")


@dataclass(frozen=True, slots=True)
class ImageSource:
    """A file as the client has sent it, or where it is."""

    content: bytes
    field: str
    """Where in the body it is."""
    url: str = ""
    """If it has to be fetched."""


@dataclass(frozen=True, slots=True)
class ImageRules:
    """Which images a server takes."""

    refusal: str = ""
    """Why it takes none; empty if it does."""
    most: int = MAX_IMAGES
    """Images of a prompt."""
    domains: frozenset[str] = frozenset()
    """Hosts that images may be fetched from."""


class ImageParts:
    """Collects the images of one conversation, in their order."""

    def __init__(self, rules: ImageRules):
        self._rules = rules
        self.sources: list[ImageSource] = []

    def add(self, part: Mapping[str, Any], role: str, field: str) -> dict[str, Any]:
        """Take over a part of type image_url; returns what the chat template gets in its place.

        Raises RequestError naming the field at fault.
        """
        if refusal := self._rules.refusal:
            raise RequestError(
                f"'{field}' is an image, and {refusal}", param=field, code="unsupported_parameter"
            )
        if role not in _ROLES:
            raise RequestError(
                f"'{field}' is an image in a message of the role {role!r:.40}: only {' and '.join(_ROLES)} "
                "may send images",
                param=field,
            )
        if len(self.sources) >= self._rules.most:
            raise RequestError(
                f"'{field}' is one of more than {self._rules.most} images: send fewer", param=field
            )
        self.sources.append(self._source(_url(part, field), field))
        return {"type": "image"}

    def _source(self, url: str, field: str) -> ImageSource:
        if not self._rules.domains or _DATA.match(url) is not None:
            return ImageSource(_content(url, field), field)
        check_url(url, self._rules.domains, field)
        return ImageSource(b"", field, url)


def image_part(url: str, detail: str | None = None) -> dict[str, Any]:
    """The part with an image that another API names in its own form."""
    return {"type": IMAGE_URL, IMAGE_URL: {"url": url, "detail": detail}}


def _url(part: Mapping[str, Any], field: str) -> str:
    given = part.get(IMAGE_URL)
    if isinstance(given, Mapping):
        unknown = sorted(given.keys() - {"url", "detail"})
        if unknown:
            raise RequestError(
                f"'{field}.{IMAGE_URL}' has '{unknown[0]:.60}', which is not a field of this server",
                param=f"{field}.{IMAGE_URL}",
                code="unsupported_parameter",
            )
        if given.get("detail") not in _DETAILS:
            raise RequestError(
                f"'{field}.{IMAGE_URL}.detail' is {given['detail']!r:.40}: this server reads every image in "
                "full; leave it out, or send a smaller image",
                param=f"{field}.{IMAGE_URL}.detail",
                code="unsupported_parameter",
            )
        given = given.get("url")
    if not isinstance(given, str):
        raise RequestError(
            f"'{field}.{IMAGE_URL}' must be an object with a url", param=f"{field}.{IMAGE_URL}"
        )
    return given


def _content(url: str, field: str) -> bytes:
    match = _DATA.match(url)
    if match is None:
        scheme, place, _ = url[:20].partition("://")
        fetches = "without --allowed-media-domains this server fetches nothing; "
        problem = f"a URL of {scheme!r} scheme: {fetches}" if place else "no image: "
        raise RequestError(
            f"'{field}' has {problem}send the image itself, as data:image/png;base64,…",
            param=field,
            code="unsupported_parameter",
        )
    if (len(url) - match.end()) * 3 // 4 > MAX_FILE_BYTES + 2:
        raise RequestError(
            f"'{field}' has more than {MAX_FILE_BYTES} bytes: send a smaller image", param=field, status=413
        )
    try:
        return binascii.a2b_base64(url[match.end() :].encode("ascii"), strict_mode=True)
    except (ValueError, UnicodeEncodeError) as error:
        raise RequestError(f"'{field}' is not valid base64: {error}", param=field) from None
