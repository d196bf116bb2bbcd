"""TLS: the context of the listening socket, from the files that the operator names, which may change.

Promises: a file that cannot be used is reported in one clear line, before anything slow starts. Must not know: routes,
the engine.
"""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime
from pathlib import Path

from quire_engine.contract.errors import ConfigError
from quire_engine.plain_files import read_plain
from quire_server.settings import Settings


class ServerTls:
    """The TLS context of a listening socket, whose certificates can be replaced while it listens.

    Each handshake takes the latest ones; connections that are open keep theirs.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError naming the setting."""
        self._settings, self._certificate = settings, settings.ssl_certfile
        self.context = self._latest = self.read()
        self.expires = self._read_expiry()
        # OpenSSL calls this in every handshake, also where the client names no server.
        self.context.sni_callback = self._choose

    def read(self) -> ssl.SSLContext:
        """A context of the files as they are now. Raises ConfigError."""
        context = tls_context(self._settings)
        if context is None:
            raise ConfigError("there is no --ssl-certfile")
        return context

    def show(self, context: ssl.SSLContext) -> None:
        """Take the certificates of this context for handshakes from now on."""
        self._latest, self.expires = context, self._read_expiry()

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._latest

    def _read_expiry(self) -> datetime | None:
        try:
            text = "" if self._certificate is None else read_plain(self._certificate).decode("ascii", errors="replace")
        except OSError:
            return None
        return expiry(text)


_CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_UTC_TIME, _EXPLICIT_0 = 0x17, 0xA0  # tags of DER


def expiry(text: str) -> datetime | None:
    """The end of validity of the first certificate in a PEM text; None where it cannot be found.

    The standard library shows it of verified peers only.
    """
    found = _CERTIFICATE.search(text)
    if found is None:
        return None
    try:
        _, whole, _ = _element(ssl.PEM_cert_to_DER_cert(found[0]))
        _, rest, _ = _element(whole)  # what is signed: version, serial number, algorithm, issuer, validity, ...
        fields: list[bytes] = []
        while rest and len(fields) < 4:
            tag, content, rest = _element(rest)
            fields += [] if tag == _EXPLICIT_0 else [content]
        _, _, rest = _element(fields[3])
        tag, content, _ = _element(rest)
        form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
        return datetime.strptime(content.decode("ascii"), form).replace(tzinfo=UTC)
    except (ValueError, IndexError):
        return None


def _element(der: bytes) -> tuple[int, bytes, bytes]:
    """The tag and the content of the first element, and what follows it. Raises IndexError."""
    tag, length, begin = der[0], der[1], 2
    if length & 0x80:
        begin += length & 0x7F
        length = int.from_bytes(der[2:begin])
    return tag, der[begin : begin + length], der[begin + length :]


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
        # A resumed session would not show its certificate again, though its authority may have been taken away. The
        # cache of sessions that TLS 1.2 has beside tickets cannot be turned off from Python.
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
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
