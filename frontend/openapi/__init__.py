"""The OpenAPI description of the server: the routes with their schemas, as one document."""

from frontend.openapi.document import openapi_document

__all__ = ["openapi_document"]
