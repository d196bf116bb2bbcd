"""Proves who may connect in a cluster: TLS 1.3 with certificates of one authority on both sides.

Promises: without certificates no address beyond this machine is listened on or connected to; a file that cannot be
used is reported in one line that names the setting.
"""

from __future__ import annotations

import ssl
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from quire_engine.contract.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSecurity:
    """The TLS of one end of a link: its certificate, and the authority of those that it accepts."""

    listening: ssl.SSLContext | None = None  # of a node; None: no TLS
    connecting: ssl.SSLContext | None = None  # of a front; None: no TLS

    def check_reach(self, where: str, addresses: Iterable[str]) -> None:
        """Raises ConfigError if an address is not of this machine and there are no certificates.

        `where`: what the message names.
        """
        if self.listening is None and not all(map(is_loopback, addresses)):
            raise ConfigError(
                f"{where} is beyond this machine, where links need certificates: set --engine-tls-cert,"
                " --engine-tls-key and --engine-tls-ca"
            )


def is_loopback(address: str) -> bool:
    """Whether an IP address is of this machine; a name is not."""
    try:
        return ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def link_security(cert: Path | None, key: Path | None, ca: Path | None) -> LinkSecurity:
    """Read the files, which are all there or all None. Raises ConfigError."""
    if len({cert is None, key is None, ca is None}) > 1:
        raise ConfigError("--engine-tls-cert, --engine-tls-key and --engine-tls-ca belong together: set all three")
    if cert is None or key is None or ca is None:
        return LinkSecurity()
    if key.is_file() and key.stat().st_mode & stat.S_IROTH:
        raise ConfigError(f"--engine-tls-key {key}: every user of this machine can read it; chmod o-r it")
    return LinkSecurity(
        listening=_context(ssl.PROTOCOL_TLS_SERVER, cert, key, ca),
        connecting=_context(ssl.PROTOCOL_TLS_CLIENT, cert, key, ca),
    )


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


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"OpenSSL says {(error.reason or 'that it cannot be read').replace('_', ' ').lower()}"
    return getattr(error, "strerror", None) or str(error)
