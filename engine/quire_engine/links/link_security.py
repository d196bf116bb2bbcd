"""The secrets of the links of a cluster: its key, and TLS 1.3 with certificates on both sides.

Promises: without both of them no address beyond this machine is listened on or connected to; a file that cannot be
used is reported in one line that names the setting.
"""

from __future__ import annotations

import ssl
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from quire_engine.contract.errors import ConfigError
from quire_engine.plain_files import read_plain

_MOST_KEY_BYTES = 1 << 16
_LEAST_KEY_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSecurity:
    """The proofs of one end of a link: the key, and its certificate with its authority."""

    key: bytes = field(default=b"", repr=False)  # empty: none
    listening: ssl.SSLContext | None = None  # of a node; None: no TLS
    connecting: ssl.SSLContext | None = None  # of a front; None: no TLS
    certificate: bytes = b""  # this end's own, DER

    def check_reach(self, where: str, addresses: Iterable[str]) -> None:
        """Raises ConfigError if an address is not of this machine and key and certificates are not both there.

        `where`: what the message names.
        """
        lacking = [
            *([] if self.key else ["--cluster-key-file"]),
            *([] if self.listening is not None else ["--engine-tls-cert, --engine-tls-key, --engine-tls-ca"]),
        ]
        if lacking and not all(map(is_loopback, addresses)):
            raise ConfigError(
                f"{where} is beyond this machine, where links need a key and certificates: set {' and '.join(lacking)}"
            )


def is_loopback(address: str) -> bool:
    """Whether an IP address is of this machine; a name is not."""
    try:
        return ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def link_security(
    *, key_file: Path | None = None, cert: Path | None = None, key: Path | None = None, ca: Path | None = None
) -> LinkSecurity:
    """Read the files; the certificates are all there or all None. Raises ConfigError."""
    if len({cert is None, key is None, ca is None}) > 1:
        raise ConfigError("--engine-tls-cert, --engine-tls-key and --engine-tls-ca belong together: set all three")
    secret = b"" if key_file is None else _read_key(key_file)
    if cert is None or key is None or ca is None:
        return LinkSecurity(key=secret)
    return LinkSecurity(
        key=secret,
        listening=_context(ssl.PROTOCOL_TLS_SERVER, cert, key, ca),
        connecting=_context(ssl.PROTOCOL_TLS_CLIENT, cert, key, ca),
        certificate=_first_certificate(cert),
    )


def _read_key(file: Path) -> bytes:
    try:
        readable = bool(file.stat().st_mode & stat.S_IROTH)
        secret = read_plain(file, _MOST_KEY_BYTES).strip()
    except OSError as error:
        raise ConfigError(f"--cluster-key-file {file}: {error.strerror}") from None
    if readable:
        raise ConfigError(f"--cluster-key-file {file}: every user of this machine can read it; chmod o-r it")
    if len(secret) < _LEAST_KEY_BYTES:
        raise ConfigError(
            f"--cluster-key-file {file}: it has {len(secret)} bytes, fewer than {_LEAST_KEY_BYTES}; make one with"
            " `openssl rand -hex 32`"
        )
    return secret


def _context(protocol: int, cert: Path, key: Path, ca: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the authority is the cluster's own: every certificate of it is a peer's
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # a resumed session would not show its certificate again
    try:
        context.load_cert_chain(cert, key, "")  # without a password OpenSSL would ask for one on the terminal
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--engine-tls-cert {cert} with --engine-tls-key {key}: {_reason(error)}") from None
    try:
        context.load_verify_locations(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--engine-tls-ca {ca}: {_reason(error)}") from None
    return context


def _first_certificate(cert: Path) -> bytes:
    """The certificate that peers see, which comes before those of its authorities in the file."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    text = read_plain(cert).decode("ascii", errors="replace")
    return ssl.PEM_cert_to_DER_cert(begin + text.partition(begin)[2].partition(end)[0] + end)


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"OpenSSL says {(error.reason or 'that it cannot be read').replace('_', ' ').lower()}"
    return getattr(error, "strerror", None) or str(error)
