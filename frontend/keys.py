"""Typed keys of the objects that routes read from the application."""

import ssl

from aiohttp import web

from atom.shared.messages.launch import FrontendLaunch
from frontend.api.chat.endpoint import ChatEndpoint
from frontend.api.completions.endpoint import CompletionEndpoint
from frontend.api.generation.generation import Generation
from frontend.api.generation.preparation import RequestPreparer
from frontend.api.messages.endpoint import MessagesEndpoint
from frontend.api.models.service import ModelService
from frontend.api.responses.endpoint import ResponsesEndpoint
from frontend.api.responses.response_store import ResponseStore
from frontend.api.tokenization.service import TokenizationService
from frontend.engine_client.client import EngineClient
from frontend.engine_client.supervisor_link import SupervisorLink
from frontend.http.auth import ApiKeys
from frontend.http.body_memory import BodyMemory
from frontend.http.cors import CorsPolicy
from frontend.http.lifecycle import Lifecycle
from frontend.http.limits import HttpLimits
from frontend.http.other_sockets import OtherSockets
from frontend.metrics.metrics import Metrics
from frontend.metrics.shared_metrics import SharedMetrics
from frontend.status.feed import StatusFeed

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
    "OTHER_SOCKETS",
    "PREPARER",
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
OTHER_SOCKETS = web.AppKey("other_sockets", OtherSockets)
PREPARER = web.AppKey("preparer", RequestPreparer)
RESPONSES = web.AppKey("responses", ResponsesEndpoint)
RESPONSE_STORE = web.AppKey("response_store", ResponseStore)
SHARED_METRICS = web.AppKey("shared_metrics", SharedMetrics)
SUPERVISOR = web.AppKey("supervisor", SupervisorLink)
STATUS = web.AppKey("status", StatusFeed)
TLS: web.AppKey[ssl.SSLContext | None] = web.AppKey("tls")
TOKENIZATION = web.AppKey("tokenization", TokenizationService)
