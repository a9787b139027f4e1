"""Where passwords come from, and how they are kept: never in clear, never in a log."""

from __future__ import annotations

import base64
import getpass
import hashlib
import hmac
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ..errors import AmqpError

# scrypt's cost: 16 MiB and some tens of milliseconds per check.
_N: Final = 2**14
_R: Final = 8
_P: Final = 1
_SCHEME: Final = "scrypt"


class IdentityError(AmqpError):
    """A user, a password or a file of them cannot be used; the sentence says why."""

    default_condition = "amqp:invalid-field"


def hash_password(password: str, *, salt: bytes | None = None) -> str:
    """*password* as it may be kept: ``scrypt$SALT$KEY``. Takes some milliseconds of CPU."""
    salt = secrets.token_bytes(16) if salt is None else salt
    key = hashlib.scrypt(password.encode(), salt=salt, n=_N, r=_R, p=_P)
    return "$".join((_SCHEME, *(base64.b64encode(part).decode() for part in (salt, key))))


def check_password(password: str, hashed: str) -> bool:
    """Whether *password* gives *hashed*; the time it takes says nothing of either."""
    _, salt, key = hashed.split("$")
    tried = hash_password(password, salt=base64.b64decode(salt)).split("$")[2]
    return hmac.compare_digest(tried, key)


class Users:
    """Users and their hashed passwords.

    A user that does not exist costs as much time as one that does.
    """

    def __init__(self, passwords: Mapping[str, str] | None = None) -> None:
        self._hashed: dict[str, str] = {}
        for user, password in (passwords or {}).items():
            self.add(user, password)
        self._dummy = hash_password(secrets.token_hex(8))

    def add(self, user: str, password: str) -> None:
        """Let *user* in with *password*; an earlier password is forgotten."""
        if not user or ":" in user:
            raise IdentityError(f"{user!r} cannot be a user's name: it is empty or has a colon")
        self._hashed[user] = hash_password(password)

    def load(self, path: str | Path) -> None:
        """Add the users of a file with lines ``NAME:HASH``; ``#`` begins a comment.

        Raises:
            IdentityError: The file cannot be read, or a line is malformed; file and line are said.
        """
        try:
            text = Path(path).read_text("utf-8")
        except OSError as error:
            raise IdentityError(f"cannot read users from {path}: {error.strerror}") from error
        for number, line in enumerate(text.splitlines(), 1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            user, _, hashed = line.partition(":")
            if not user or not _is_hash(hashed):
                raise IdentityError(f"{path}, line {number}: expected NAME:scrypt$SALT$KEY")
            self._hashed[user] = hashed

    def line(self, user: str) -> str:
        """The line of a users' file for *user*."""
        return f"{user}:{self._hashed[user]}"

    def __contains__(self, user: object) -> bool:
        return user in self._hashed

    def __len__(self) -> int:
        return len(self._hashed)

    def check(self, user: str, password: str) -> str | None:
        """The user's name, or None if the password is not the user's.

        Takes tens of milliseconds of CPU; run it in a worker thread.
        """
        hashed = self._hashed.get(user)
        right = check_password(password, hashed or self._dummy)
        return user if right and hashed is not None else None

    def __repr__(self) -> str:
        return f"<Users: {len(self._hashed)}>"


def _is_hash(text: str) -> bool:
    parts = text.split("$")
    if len(parts) != 3 or parts[0] != _SCHEME:
        return False
    try:
        return all(base64.b64decode(part, validate=True) for part in parts[1:])
    except ValueError:
        return False


def parse_user(text: str, *, environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Name and password of ``--user``, so that the password need not be on the command line.

    ``NAME:PASSWORD`` as it stands; ``NAME:@FILE`` reads the first line of a file; ``NAME:-`` reads a
    line of standard input, without echo at a terminal; ``NAME`` alone takes the environment's
    ``AMQP_RT_PASSWORD_NAME`` (upper case, other characters as ``_``).

    Raises:
        IdentityError: There is no password there.
    """
    name, colon, rest = text.partition(":")
    if not name:
        raise IdentityError("--user needs NAME:PASSWORD, NAME:@FILE, NAME:- or NAME")
    if not colon:
        variable = "AMQP_RT_PASSWORD_" + "".join(
            letter if letter.isalnum() else "_" for letter in name.upper()
        )
        if variable not in environ:
            raise IdentityError(f"no password for {name!r}: set {variable}, or use {name}:@FILE")
        return name, environ[variable]
    if rest == "-":
        if sys.stdin.isatty():
            return name, getpass.getpass(f"Password for {name}: ")
        return name, sys.stdin.readline().rstrip("\r\n")
    if rest.startswith("@"):
        try:
            with open(rest[1:], encoding="utf-8") as file:
                return name, file.readline().rstrip("\r\n")
        except OSError as error:
            raise IdentityError(
                f"cannot read the password of {name!r} from {rest[1:]}: {error.strerror}"
            ) from error
    return name, rest
