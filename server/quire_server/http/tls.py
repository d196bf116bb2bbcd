"""TLS: the context of the listening socket, from the files that the operator names.

Promises: a file that cannot be used is reported in one clear line, before anything slow starts. Must not know: routes,
the engine.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from quire_engine.errors import ConfigError
from quire_server.settings import Settings


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """The TLS context of connections; None where no certificate is set. Raises ConfigError naming the setting."""
    if settings.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # TLS 1.2 or newer, with Python's default ciphers
    context.set_alpn_protocols(["http/1.1"])
    _load_certificate(context, settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_keyfile_password)
    if settings.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(cafile=settings.ssl_ca_certs)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--ssl-ca-certs {settings.ssl_ca_certs}: {_reason(error)}") from None
        context.verify_mode = ssl.VerifyMode(settings.ssl_cert_reqs)
    return context


def _load_certificate(context: ssl.SSLContext, certificate: Path, key: Path | None, password: str | None) -> None:
    # Without a password OpenSSL would ask for one on the terminal.
    try:
        context.load_cert_chain(certificate, key, password or "")
    except (OSError, ssl.SSLError) as error:
        files = f"--ssl-certfile {certificate}" + (f" with --ssl-keyfile {key}" if key is not None else "")
        hint = ""
        if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
            hint = "; the key belongs to another certificate"
        elif key is None and not _is_locked(error):
            hint = "; the private key must be in it too, or in --ssl-keyfile"
        elif _is_locked(error) or not _has_reason(error):
            hint = "; the key may need the right --ssl-keyfile-password"
        raise ConfigError(f"{files}: {_reason(error)}{hint}") from None


def _is_locked(error: Exception) -> bool:
    return isinstance(error, ssl.SSLError) and error.reason in {"BAD_DECRYPT", "BAD_PASSWORD_READ"}


def _has_reason(error: Exception) -> bool:
    return not isinstance(error, ssl.SSLError) or bool(error.reason)


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"OpenSSL says {(error.reason or 'that it cannot be read').replace('_', ' ').lower()}"
    return getattr(error, "strerror", None) or str(error)
