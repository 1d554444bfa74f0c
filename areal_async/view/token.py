"""Who may look: the token, and the names under which the server may be asked.

What always holds: off the loopback interface nothing is served without the token, which is compared in constant time;
on it, a request is answered only if it was meant for this machine (`Host`), so that no page of another site whose name
was made to point here (DNS rebinding) can read a run.
"""

import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from areal_async.errors import ConfigError

VARIABLE: Final = "AREAL_ASYNC_TOKEN"
AUTO: Final = "auto"
TOKEN_BYTES: Final = 24  # of randomness in one that is made here
SHORTEST: Final = 12  # characters of one that people choose
_FORM: Final = re.compile(r"[A-Za-z0-9._~-]+")  # what an address may have as it is
_LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Access:
    """host: that is listened on. token: "" for none, which only a loopback address may have."""

    host: str
    token: str

    @property
    def cookie(self) -> str:
        """Its name. Cookies know no ports: two viewers of one machine must not overwrite each other's."""
        return f"areal_async_{hashlib.sha256(self.token.encode()).hexdigest()[:12]}"

    def knows_host(self, header: str) -> bool:
        """Whether a request with this `Host` was meant for this server. The port is left out: a tunnel has its own."""
        if not is_loopback(self.host):
            return True  # the token is what protects; a machine has more names than can be known here
        name = header.lower()
        name = name[1 : name.find("]")] if name.startswith("[") else name.rpartition(":")[0] or name
        return name in (*_LOOPBACK_NAMES, self.host.lower())

    def knows_token(self, given: str | None) -> bool:
        """In constant time."""
        return not self.token or hmac.compare_digest((given or "").encode(errors="replace"), self.token.encode())

    def lets_in(self, headers: Mapping[str, str], cookies: Mapping[str, str]) -> bool:
        """Whether the request has the token, as a cookie or as `Authorization: Bearer …`."""
        kind, _, bearer = headers.get("Authorization", "").partition(" ")
        given = bearer.strip() if kind.lower() == "bearer" else cookies.get(self.cookie)
        return self.knows_token(given)


def access(host: str, token: str | None, environment: Mapping[str, str]) -> Access:
    """token: of the command line; `auto` makes one. Errors: ConfigError: no token where there must be one, or one that
    is none."""
    chosen = token if token is not None else environment.get(VARIABLE, "")
    if chosen == AUTO:
        chosen = secrets.token_urlsafe(TOKEN_BYTES)
    where = "command line: view: --token" if token is not None else VARIABLE
    if token is not None and not chosen:
        raise ConfigError(f"{where}: is empty; `--token {AUTO}` makes one")
    if chosen and not _FORM.fullmatch(chosen):
        raise ConfigError(f"{where}: letters, digits and ._~- only, since it stands in an address")
    if chosen and len(chosen) < SHORTEST:
        raise ConfigError(f"{where}: {len(chosen)} characters can be guessed; at least {SHORTEST}, or `--token {AUTO}`")
    if not chosen and not is_loopback(host):
        raise ConfigError(
            f"command line: view: --host {host}: other machines could read the run; add `--token {AUTO}` (or set "
            f"{VARIABLE}), or leave --host out and come through ssh"
        )
    return Access(host, chosen)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
