"""Throwaway certificates, made by the openssl program."""

import ssl
import subprocess
from pathlib import Path


def make_authority(directory: Path) -> Path:
    """The certificate of an authority (`authority.pem`); its key is next to it."""
    certificate = directory / "authority.pem"
    _request(directory, "authority", "-x509", "-days", "2", "-out", certificate)
    return certificate


def make_certificate(directory: Path, name: str) -> tuple[str, str]:
    """(certificate, private key) for this host, signed by the authority in `directory`."""
    _request(directory, name, "-out", directory / f"{name}.csr")
    extensions = directory / f"{name}.ext"
    extensions.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    authority = directory / "authority.pem"
    signed = ["-CA", authority, "-CAkey", directory / "authority.key", "-extfile", extensions, "-days", "2"]
    out = directory / f"{name}.pem"
    _openssl("x509", "-req", "-in", directory / f"{name}.csr", *signed, "-out", out)
    return str(out), str(directory / f"{name}.key")


def client_context(authority: Path) -> ssl.SSLContext:
    """Trusts `authority` alone."""
    return ssl.create_default_context(cafile=str(authority))


def _request(directory: Path, name: str, *options: str | Path) -> None:
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc"]
    _openssl("req", *key, "-keyout", directory / f"{name}.key", "-subj", f"/CN={name}", *options)


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=30)
