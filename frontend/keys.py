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
from frontend.serving.messages import MessagesEndpoint
from frontend.serving.models import ModelService
from frontend.serving.response_store import ResponseStore
from frontend.serving.responses import ResponsesEndpoint
from frontend.serving.tokenization import TokenizationService
from frontend.shared_metrics import SharedMetrics
from frontend.status.feed import StatusFeed
from frontend.supervisor_link import SupervisorLink

__all__ = [
    "API_KEYS",
    "BODY_MEMORY",
    "CHAT",
    "CLIENT",
    "COMPLETIONS",
    "CORS",
    "GENERATION",
    "IS_ADMIN",
    "LAUNCH",
    "LIFECYCLE",
    "LIMITS",
    "MESSAGES",
    "METRICS",
    "MODELS",
    "RESPONSES",
    "RESPONSE_STORE",
    "SHARED_METRICS",
    "STATUS",
    "SUPERVISOR",
    "TLS",
    "TOKENIZATION",
]

API_KEYS = web.AppKey("api_keys", ApiKeys)
BODY_MEMORY = web.AppKey("body_memory", BodyMemory)
CHAT = web.AppKey("chat", ChatEndpoint)
CLIENT = web.AppKey("client", EngineClient)
COMPLETIONS = web.AppKey("completions", CompletionEndpoint)
CORS = web.AppKey("cors", CorsPolicy)
IS_ADMIN = web.AppKey("is_admin", bool)
GENERATION = web.AppKey("generation", Generation)
LAUNCH = web.AppKey("launch", FrontendLaunch)
LIFECYCLE = web.AppKey("lifecycle", Lifecycle)
LIMITS = web.AppKey("limits", HttpLimits)
MESSAGES = web.AppKey("messages", MessagesEndpoint)
METRICS = web.AppKey("metrics", Metrics)
MODELS = web.AppKey("models", ModelService)
RESPONSES = web.AppKey("responses", ResponsesEndpoint)
RESPONSE_STORE = web.AppKey("response_store", ResponseStore)
SHARED_METRICS = web.AppKey("shared_metrics", SharedMetrics)
SUPERVISOR = web.AppKey("supervisor", SupervisorLink)
STATUS = web.AppKey("status", StatusFeed)
TLS: web.AppKey[ssl.SSLContext | None] = web.AppKey("tls")
TOKENIZATION = web.AppKey("tokenization", TokenizationService)
