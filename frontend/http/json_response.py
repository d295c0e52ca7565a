"""Responses in JSON that are sent whole."""

from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

__all__ = ["encoded_response", "json_response"]


def json_response(value: Mapping[str, Any] | msgspec.Struct) -> web.Response:
    """A response with this value."""
    return encoded_response(msgspec.json.encode(value))


def encoded_response(body: bytes) -> web.Response:
    """A response with this JSON text."""
    return web.Response(body=body, content_type="application/json")
