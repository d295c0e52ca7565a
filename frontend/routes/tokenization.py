"""POST /tokenize, /detokenize, /v1/messages/count_tokens and /v1/responses/input_tokens."""

from aiohttp import web

from frontend.http.json_response import encoded_response
from frontend.keys import TOKENIZATION
from frontend.routes.access import TENANT
from frontend.routes.bodies import open_body

__all__ = ["routes"]

routes = web.RouteTableDef()


@routes.post("/tokenize")
async def tokenize(request: web.Request) -> web.Response:
    """Token ids of a text or of a conversation."""
    async with open_body(request) as body:
        return encoded_response(await request.app[TOKENIZATION].tokenize(body))


@routes.post("/detokenize")
async def detokenize(request: web.Request) -> web.Response:
    """Text of token ids."""
    async with open_body(request) as body:
        return encoded_response(await request.app[TOKENIZATION].detokenize(body))


@routes.post("/v1/messages/count_tokens")
async def count_tokens(request: web.Request) -> web.Response:
    """The number of prompt tokens of a conversation in Anthropic's format."""
    async with open_body(request) as body:
        return encoded_response(await request.app[TOKENIZATION].count_tokens(body))


@routes.post("/v1/responses/input_tokens")
async def input_tokens(request: web.Request) -> web.Response:
    """The number of prompt tokens of a request to /v1/responses."""
    async with open_body(request) as body:
        return encoded_response(await request.app[TOKENIZATION].input_tokens(body, request[TENANT]))
