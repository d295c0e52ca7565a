"""The HTTP server."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from atom.shared.config.fields import NAMES, OBJECT, bytes_from


@dataclass(frozen=True)
class ServerConfig:
    host: Annotated[str, Meta(min_length=1)] = "0.0.0.0"
    """Address to listen on."""
    server_port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """HTTP port; 0 takes a free port, which the start-up banner shows."""
    api_server_count: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Number of HTTP processes that share the port."""
    default_max_tokens: Annotated[int, Meta(ge=1)] | None = None
    """Default of a request's max_tokens. If unset: min(8192, what fits) for chat, 256 for completions."""
    override_generation_config: Annotated[str, OBJECT] | None = None
    """JSON object: how requests sample that do not say it, over generation_config.json's values, as
    '{"temperature": 0.2}'; also top_p, top_k, min_p, repetition_penalty."""
    lenient_fields: bool = False
    """Accept unsupported request fields and list them as `warnings` in the response."""
    allow_control_tokens_in_content: bool = False
    """Let texts of chat messages hold control tokens such as <|im_start|>; else they are plain text."""
    api_key: Annotated[str, Meta(min_length=1)] | None = None
    """API key, or several separated by commas. Set ATOM_API_KEY instead to hide it from `ps`."""
    allowed_origins: Annotated[str, NAMES] = "*"
    """Origins of web pages that may use the server (CORS), such as https://chat.example.org; * allows all."""
    allowed_methods: Annotated[str, NAMES] = "*"
    """HTTP methods that these pages may use."""
    allowed_headers: Annotated[str, NAMES] = "*"
    """Request headers that these pages may send."""
    allow_credentials: bool = False
    """Let these pages send cookies and client certificates; needs --allowed-origins."""
    ssl_certfile: Annotated[str, Meta(min_length=1)] | None = None
    """Certificate chain (PEM): serve HTTPS. Renewed files are used within 10 s, for new connections."""
    ssl_keyfile: Annotated[str, Meta(min_length=1)] | None = None
    """Private key of the certificate (PEM), if it is not in the same file."""
    ssl_ca_certs: Annotated[str, Meta(min_length=1)] | None = None
    """Certificates of the authorities that sign clients' certificates (PEM)."""
    ssl_cert_reqs: Annotated[int, Meta(ge=0, le=2)] = 0
    """Whether clients must show a certificate: 0 no, 1 it is checked if they do, 2 yes."""
    otlp_traces_endpoint: Annotated[str, Meta(min_length=1)] | None = None
    """OpenTelemetry collector for traces of requests: its HTTP URL, such as http://HOST:4318/v1/traces."""
    admin_port: Annotated[int, Meta(ge=0, le=65535)] | None = None
    """Port of the administration, on 127.0.0.1 alone; 0 takes a free one. If unset, there is none."""
    admin_socket: Annotated[str, Meta(min_length=1)] | None = None
    """Unix socket of the administration instead, which only the server's user can open."""
    upgrade_from: Annotated[str, Meta(min_length=1)] | None = None
    """Replace this running server without a break, once this one is ready: its process id or admin socket."""
    max_queued_requests: Annotated[int, Meta(ge=0)] = 1024
    """Most waiting requests; further ones get status 429 with Retry-After."""
    max_body_bytes: Annotated[int, bytes_from(1024)] | None = None
    """Largest request body. If unset: 8 MiB, 64 MiB for a model that reads images, or 16 bytes per token of
    the context length if that is more."""
    allowed_media_domains: Annotated[str, NAMES] | None = None
    """Hosts that URLs of images may name, as host or host:port; public addresses only. If unset: none, and
    images come with their requests."""
    disable_status_page: bool = False
    """Do not serve the status page at / and its data at /status."""
    max_stored_response_bytes: Annotated[int, bytes_from(0)] = 64 << 20
    """Memory for responses that `previous_response_id` may name; 0 keeps none."""
    chat_template: Annotated[str, Meta(min_length=1)] | None = None
    """Jinja chat template file that replaces the checkpoint's."""
    tool_call_parser: (
        Literal[
            "deepseek_v3",
            "deepseek_v31",
            "deepseek_v32",
            "deepseek_v4",
            "generic",
            "glm45",
            "glm47",
            "granite",
            "granite4",
            "hermes",
            "kimi_k2",
            "llama3_json",
            "llama4_json",
            "llama4_pythonic",
            "minimax_m2",
            "mistral",
            "none",
            "olmo3",
            "openai",
            "phi4_mini_json",
            "pythonic",
            "qwen3_coder",
            "qwen3_xml",
        ]
        | None
    ) = None
    """Format of the model's tool calls, by vLLM's names. If unset, the chat template tells, and for one that
    reads no tools it is `generic`: a system message describes them."""
    reasoning_parser: (
        Literal[
            "deepseek_r1",
            "deepseek_v3",
            "glm45",
            "granite",
            "granite_tags",
            "kimi_k2",
            "minimax_m2",
            "mistral",
            "none",
            "olmo3",
            "openai_gptoss",
            "qwen3",
        ]
        | None
    ) = None
    """Format of the model's reasoning, by vLLM's names. If unset, the chat template tells."""
    shutdown_timeout: Annotated[float, Meta(ge=0)] = 30.0
    """Seconds that running requests may take to finish after SIGTERM."""
