"""Typed keys of the objects that routes read from the application."""

import ssl

from aiohttp import web

from atom.messages.launch import FrontendLaunch
from frontend.auth import ApiKeys
from frontend.body_memory import BodyMemory
from frontend.cors import CorsPolicy
from frontend.engine_client import EngineClient
from frontend.lifecycle import Lifecycle
from frontend.limits import HttpLimits
from frontend.metrics import Metrics
from frontend.serving.chat import ChatEndpoint
from frontend.serving.completions import CompletionEndpoint
from frontend.serving.generation import Generation
from frontend.serving.models import ModelService
from frontend.serving.tokenization import TokenizationService
from frontend.shared_metrics import SharedMetrics
from frontend.status.feed import StatusFeed

__all__ = [
    "API_KEYS",
    "BODY_MEMORY",
    "CHAT",
    "CLIENT",
    "COMPLETIONS",
    "CORS",
    "GENERATION",
    "LAUNCH",
    "LIFECYCLE",
    "LIMITS",
    "METRICS",
    "MODELS",
    "SHARED_METRICS",
    "STATUS",
    "TLS",
    "TOKENIZATION",
]

API_KEYS = web.AppKey("api_keys", ApiKeys)
BODY_MEMORY = web.AppKey("body_memory", BodyMemory)
CHAT = web.AppKey("chat", ChatEndpoint)
CLIENT = web.AppKey("client", EngineClient)
COMPLETIONS = web.AppKey("completions", CompletionEndpoint)
CORS = web.AppKey("cors", CorsPolicy)
GENERATION = web.AppKey("generation", Generation)
LAUNCH = web.AppKey("launch", FrontendLaunch)
LIFECYCLE = web.AppKey("lifecycle", Lifecycle)
LIMITS = web.AppKey("limits", HttpLimits)
METRICS = web.AppKey("metrics", Metrics)
MODELS = web.AppKey("models", ModelService)
SHARED_METRICS = web.AppKey("shared_metrics", SharedMetrics)
STATUS = web.AppKey("status", StatusFeed)
TLS: web.AppKey[ssl.SSLContext | None] = web.AppKey("tls")
TOKENIZATION = web.AppKey("tokenization", TokenizationService)
