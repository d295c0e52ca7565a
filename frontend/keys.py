"""Typed keys of what the routes find in the application."""

from typing import Any

from aiohttp import web

from frontend.engine_client import EngineClient
from frontend.lifecycle import Lifecycle
from frontend.serving.generation import GenerationService
from frontend.serving.models import ModelService

__all__ = ["CHAT", "CLIENT", "COMPLETIONS", "LIFECYCLE", "MODELS"]

CHAT = web.AppKey("chat", GenerationService[Any])
CLIENT = web.AppKey("client", EngineClient)
COMPLETIONS = web.AppKey("completions", GenerationService[Any])
LIFECYCLE = web.AppKey("lifecycle", Lifecycle)
MODELS = web.AppKey("models", ModelService)
