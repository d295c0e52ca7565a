"""Content parts that are images, in OpenAI's form: {"type": "image_url", "image_url": {"url": …}}.

The files come as data: URLs. Nothing is fetched.
"""

import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atom.shared.messages.images import MAX_FILE_BYTES, MAX_IMAGES
from frontend.errors import RequestError

__all__ = ["IMAGE_URL", "ImageParts", "ImageSource", "image_part"]

IMAGE_URL = "image_url"
_DATA = re.compile(r"data:(?:image/[\w.+-]+)?(?:;[\w-]+=[\w.-]+)*;base64,", re.IGNORECASE | re.ASCII)
_DETAILS = (None, "auto", "high", "original")
_ROLES = ("user", "tool")


@dataclass(frozen=True, slots=True)
class ImageSource:
    """A file as the client has sent it."""

    content: bytes
    field: str
    """Where in the body it is."""


class ImageParts:
    """Collects the images of one conversation, in their order."""

    def __init__(self, refusal: str):
        """`refusal`: why the model takes no images; empty if it does."""
        self._refusal = refusal
        self.sources: list[ImageSource] = []

    def add(self, part: Mapping[str, Any], role: str, field: str) -> dict[str, Any]:
        """Take over a part of type image_url; returns what the chat template gets in its place.

        Raises RequestError naming the field at fault.
        """
        if self._refusal:
            raise RequestError(
                f"'{field}' is an image, and {self._refusal}", param=field, code="unsupported_parameter"
            )
        if role not in _ROLES:
            raise RequestError(
                f"'{field}' is an image in a message of the role {role!r:.40}: only {' and '.join(_ROLES)} "
                "may send images",
                param=field,
            )
        if len(self.sources) >= MAX_IMAGES:
            raise RequestError(f"'{field}' is one of more than {MAX_IMAGES} images: send fewer", param=field)
        self.sources.append(ImageSource(_content(_url(part, field), field), field))
        return {"type": "image"}


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
        kind = url.partition(":")[0][:20] if ":" in url[:20] else "no"
        raise RequestError(
            f"'{field}' has a URL of {kind!r} scheme: this server fetches nothing; send the image itself, as "
            "data:image/png;base64,…",
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
