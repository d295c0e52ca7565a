"""TLS of the HTTP server: certificate, private key, and the certificates of clients."""

import asyncio
import os
import ssl
from pathlib import Path
from typing import NoReturn

from atom.shared.config.server import ServerConfig
from atom.shared.utils.logger import get_logger

__all__ = ["follow_files", "tls_context"]

_RELOAD_INTERVAL_S = 10.0
_VERIFY_MODES = (ssl.CERT_NONE, ssl.CERT_OPTIONAL, ssl.CERT_REQUIRED)


def tls_context(server: ServerConfig) -> ssl.SSLContext | None:
    """The context of --ssl-certfile and the like; None without them. Raises ValueError for unusable files."""
    if server.ssl_certfile is None:
        given = {"--ssl-keyfile": server.ssl_keyfile, "--ssl-ca-certs": server.ssl_ca_certs}
        if server.ssl_cert_reqs:
            given["--ssl-cert-reqs"] = str(server.ssl_cert_reqs)
        for flag, value in given.items():
            if value is not None:
                raise ValueError(f"{flag} needs --ssl-certfile: without a certificate the server has no TLS")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    _load_certificate(context, server.ssl_certfile, server.ssl_keyfile)
    context.verify_mode = _VERIFY_MODES[server.ssl_cert_reqs]
    if server.ssl_ca_certs is not None:
        _load_authorities(context, server.ssl_ca_certs)
    elif server.ssl_cert_reqs:
        raise ValueError(
            "--ssl-cert-reqs needs --ssl-ca-certs: the authorities that sign clients' certificates"
        )
    return context


async def follow_files(context: ssl.SSLContext, server: ServerConfig) -> None:
    """Load a renewed certificate into `context`, for new connections; an unusable one is logged."""
    loaded = _version(server)
    while True:
        await asyncio.sleep(_RELOAD_INTERVAL_S)
        if (found := _version(server)) == loaded:
            continue
        loaded = found
        try:
            tls_context(server)  # a context that fails to load has lost the certificate before
            assert server.ssl_certfile is not None
            _load_certificate(context, server.ssl_certfile, server.ssl_keyfile)
        except ValueError as error:
            get_logger().error("the renewed certificate is not used: %s", error)
        else:
            get_logger().info("the renewed certificate is in use")


def _version(server: ServerConfig) -> list[int]:
    """Changes when a file of the certificate does."""
    files = [server.ssl_certfile, server.ssl_keyfile]
    return [os.stat(file).st_mtime_ns for file in files if file is not None and os.path.exists(file)]


def _load_certificate(context: ssl.SSLContext, certificate: str, key: str | None) -> None:
    _check_readable("--ssl-certfile", certificate)
    if key is not None:
        _check_readable("--ssl-keyfile", key)
    try:
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except ssl.SSLError as error:
        files = f"--ssl-certfile {certificate}" + (f" --ssl-keyfile {key}" if key is not None else "")
        raise ValueError(f"{files}: {_problem(error, key)}") from None


def _load_authorities(context: ssl.SSLContext, file: str) -> None:
    _check_readable("--ssl-ca-certs", file)
    try:
        context.load_verify_locations(file)
    except ssl.SSLError:
        raise ValueError(f"--ssl-ca-certs {file}: it contains no certificate in PEM format") from None


def _check_readable(flag: str, file: str) -> None:
    try:
        with Path(file).open("rb"):
            pass
    except OSError as error:
        raise ValueError(f"{flag} {file}: {error.strerror}") from None


def _problem(error: ssl.SSLError, key: str | None) -> str:
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the private key is not that of the certificate"
    if error.reason == "EE_KEY_TOO_SMALL":
        return "the certificate's key is too small: use RSA of 2048 bits, or an elliptic curve"
    if key is None:
        return "the file must contain a certificate and its private key, in PEM format; or add --ssl-keyfile"
    return "the files must contain a certificate and its private key, in PEM format"


def _refuse_password() -> NoReturn:
    raise ValueError("--ssl-keyfile: the private key is encrypted; decrypt it with `openssl pkey`")
