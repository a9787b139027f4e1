"""Users and their passwords, which are never stored in clear and never logged."""

from __future__ import annotations

import base64
import getpass
import hashlib
import hmac
import os
import re
import secrets
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

from ..config_files import sync_folder
from ..errors import AmqpError
from .scram import (
    HASHES,
    ITERATIONS,
    ITERATIONS_MIN,
    ScramSecret,
    make_secret,
    read_secret,
    saslprep,
)

# scrypt's cost: 16 MiB and some tens of milliseconds per check.
_N: Final = 2**14
_R: Final = 8
_P: Final = 1
_SCHEME: Final = "scrypt"
_SALT_SIZE: Final = 16
_KEY_SIZE: Final = 64
_FORM: Final = (
    "NAME:scrypt$SALT$KEY, maybe with ,scram-sha-256$… after it; amqp-rt user add makes it"
)
#: Iterations of the SCRAM secrets of users that the program adds, which are in memory only.
_ITERATIONS: Final = ITERATIONS_MIN


class IdentityError(AmqpError):
    """A user, a password or a users' file cannot be used; the text has the reason."""

    default_condition = "amqp:invalid-field"


def hash_password(password: str, *, salt: bytes | None = None) -> str:
    """Return *password* hashed for storage, ``scrypt$SALT$KEY``. Takes some tens of milliseconds."""
    salt = secrets.token_bytes(_SALT_SIZE) if salt is None else salt
    key = hashlib.scrypt(password.encode(), salt=salt, n=_N, r=_R, p=_P, dklen=_KEY_SIZE)
    return "$".join((_SCHEME, *(base64.b64encode(part).decode() for part in (salt, key))))


def check_password(password: str, hashed: str) -> bool:
    """Return whether *password* matches *hashed*, in a time that depends on neither."""
    salt = base64.b64decode(hashed.split("$")[1])
    return hmac.compare_digest(hash_password(password, salt=salt).encode(), hashed.encode())


def password_line(user: str, password: str, *, scram: Collection[str] = ()) -> str:
    """Return the line of a users' file for *user* with *password*.

    Args:
        user: The user's name.
        password: The password, which is stored only as hashes.
        scram: Hashes of SCRAM to store, of ``SHA-1``, ``SHA-256`` and ``SHA-512``. If the file is
            stolen, passwords can be guessed faster from these than from scrypt.

    Raises:
        IdentityError: The name or the password cannot be used.
    """
    _check_user(user, password)
    kept = [hash_password(password), *(str(make_secret(password, each)) for each in scram)]
    return f"{user}:{','.join(kept)}"


class Users:
    """Users and the hashes that their passwords are checked with.

    Passwords given by the program are kept as a keyed digest, in memory only; those of a file as in
    the file. A check takes as long for an unknown user as for a known one.

    Args:
        passwords: User name → password in clear.
    """

    def __init__(self, passwords: Mapping[str, str] | None = None) -> None:
        self._key = secrets.token_bytes(32)
        self._digests: dict[str, bytes] = {}
        self._hashes: dict[str, str] = {}
        self._scram: dict[str, dict[str, ScramSecret]] = {}
        #: Of users of a file, the keyed digest of the last correct password, and the hash that it matched.
        self._recalled: dict[str, tuple[bytes, str]] = {}
        #: User → file that the user was loaded from; and the file loaded last.
        self._files: dict[str, Path] = {}
        self._file: Path | None = None
        # A random hash for unknown users, which no password matches.
        self._nobody = "$".join(
            (
                _SCHEME,
                base64.b64encode(secrets.token_bytes(_SALT_SIZE)).decode(),
                base64.b64encode(secrets.token_bytes(_KEY_SIZE)).decode(),
            )
        )
        for user, password in (passwords or {}).items():
            self.add(user, password)

    def add(self, user: str, password: str) -> None:
        """Add *user* with *password*, replacing an earlier password.

        Raises:
            IdentityError: The name or the password cannot be used.
        """
        _check_user(user, password)
        self._hashes.pop(user, None)
        self._digests[user] = self._digest(password)
        self._scram[user] = {
            each: make_secret(password, each, iterations=_ITERATIONS) for each in HASHES
        }

    def load(self, path: str | Path) -> None:
        """Add the users of a file with lines ``NAME:scrypt$SALT$KEY``; ``#`` begins a comment.

        Nothing is added unless every line is valid.

        Raises:
            IdentityError: The file cannot be read, or a line is malformed; the text has file and line.
        """
        loaded: dict[str, str] = {}
        scram: dict[str, dict[str, ScramSecret]] = {}
        for number, line in enumerate(read_secret_file(path, "users").splitlines(), 1):
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            user, _, kept = line.partition(":")
            hashed, *others = kept.split(",")
            read = [read_secret(each) for each in others]
            if not user or not _is_hash(hashed) or None in read:
                raise IdentityError(f"{path}, line {number}: expected {_FORM}")
            if user in loaded:
                raise IdentityError(f"{path}, line {number}: {user!r} is there twice")
            loaded[user] = hashed
            scram[user] = {each.hash: each for each in read if each is not None}
        for user in loaded:
            self._digests.pop(user, None)
        self._hashes |= loaded
        self._scram |= scram
        self._file = Path(path)
        self._files |= dict.fromkeys(loaded, self._file)

    def remove(self, user: str) -> None:
        """Remove *user*, if present."""
        self._digests.pop(user, None)
        self._hashes.pop(user, None)
        self._scram.pop(user, None)
        self._recalled.pop(user, None)

    def store(self, user: str, password: str) -> None:
        """Add *user* as :meth:`add` does, and store the hash in the file that *user* was loaded from.

        A new user is stored in the file that was loaded last; without one, and for users that the
        program added, this is :meth:`add`. Writing the file and hashing take long: call it in a
        worker thread, one change at a time. Concurrent checks see the old password or the new one.

        Raises:
            IdentityError: The name or the password cannot be used, or the file cannot be written;
                nothing has changed.
        """
        file = None if user in self._digests else self._files.get(user, self._file)
        if file is None:
            self.add(user, password)
            return
        # Users of the file log in by these hashes of SCRAM; a new user must have them too.
        line = password_line(user, password, scram=self.scram_hashes)
        rewrite(file, user, line)
        hashed, *others = line.partition(":")[2].split(",")
        made = [read_secret(each) for each in others]
        self._scram[user] = {each.hash: each for each in made if each is not None}
        self._hashes[user] = hashed
        self._files[user] = file

    def forget(self, user: str) -> None:
        """Remove *user* as :meth:`remove` does, and from its file; see :meth:`store`.

        Raises:
            IdentityError: The file cannot be written; nothing has changed.
        """
        file = self._files.get(user)
        if file is not None and user in self._hashes:
            rewrite(file, user, None)
            del self._files[user]
        self.remove(user)

    def __iter__(self) -> Iterator[str]:
        # Iterates over copies, since other threads may change the originals.
        return iter(sorted(self._digests.copy() | self._hashes.copy()))

    def __contains__(self, user: object) -> bool:
        return user in self._digests or user in self._hashes

    def __len__(self) -> int:
        return len(self._digests) + len(self._hashes)

    def check(self, user: str, password: str) -> str | None:
        """Return the user's name, or None if the password is wrong.

        With users of a file a check takes tens of milliseconds of CPU and 16 MiB: run it in a worker
        thread, and few at a time, as any client that can connect causes checks.
        """
        kept = self._digests.get(user, self._key)
        right = hmac.compare_digest(self._digest(password), kept)
        if self._hashes:
            # Done for every user, so that the time does not reveal how a password is stored.
            hashed = self._hashes.get(user, self._nobody)
            if check_password(password, hashed):
                right = True
                self._recalled[user] = self._digest(password), hashed
        return user if right else None

    def recall(self, user: str, password: str) -> bool:
        """Return whether *password* was correct in an earlier :meth:`check` and is unchanged since.

        Also true for a password that the program gave. Takes negligible time. After False,
        :meth:`check` has to decide.
        """
        given = self._digest(password)
        digest, hashed = self._recalled.get(user, (self._key, ""))
        recalled = hmac.compare_digest(given, digest) and self._hashes.get(user) == hashed
        return recalled or hmac.compare_digest(given, self._digests.get(user, self._key))

    def scram(self, user: str, hash_name: str) -> ScramSecret | None:
        """Return the user's secret for SCRAM with *hash_name*, such as ``SHA-256``, or None."""
        return self._scram.get(user, {}).get(hash_name)

    @property
    def scram_hashes(self) -> tuple[str, ...]:
        """Hashes with which every user can log in by SCRAM, the strongest first."""
        if not self._scram:
            return ()
        every = self._scram.copy().values()
        return tuple(each for each in HASHES if all(each in kept for kept in every))

    def scram_iterations(self) -> int:
        """Return the most common iteration count, which unknown users must present too."""
        every = self._scram.copy().values()
        counts = Counter(each.iterations for kept in every for each in kept.values())
        return counts.most_common(1)[0][0] if counts else ITERATIONS

    def _digest(self, password: str) -> bytes:
        return hmac.digest(self._key, password.encode(), "sha256")

    def __repr__(self) -> str:
        return f"<Users: {len(self)}>"


def rewrite(path: str | Path, user: str, line: str | None, *, create: bool = False) -> bool:
    """Replace the line of *user* in a users' file by *line*; None removes it.

    The other lines stay as they are. The file is replaced atomically, and readable for its owner
    only; *create* creates it if it does not exist. Returns whether *user* was in it.

    Raises:
        IdentityError: The file cannot be read or written and is unchanged, unless the disk only
            failed to confirm the replacement.
    """
    file = Path(path).resolve()
    lines = [] if create and not file.exists() else read_secret_file(path, "users").splitlines()
    kept = [each for each in lines if user_of(each) != user]
    there = len(kept) < len(lines)
    if line is not None:
        kept.append(line)
    elif not there:
        return False
    temporary = ""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
        with os.fdopen(descriptor, "w", encoding="utf-8") as output:
            output.write("".join(f"{each}\n" for each in kept))
            output.flush()
            os.fsync(output.fileno())
        os.replace(temporary, file)
        # After a power failure, a removed user or an old password must not be back.
        sync_folder(file)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise IdentityError(
            f"cannot write users to {path}: {error.strerror}", condition="amqp:internal-error"
        ) from error
    return there


def user_of(line: str) -> str | None:
    """Return the user of a line of a users' file; None for a comment."""
    line = line.strip()
    return None if not line or line.startswith("#") else line.partition(":")[0]


def _check_user(user: str, password: str) -> None:
    if (
        not user
        or user[0] == "#"
        or re.search(r"[:\0-\x1f\x85\u2028\u2029]", user)
        or user != user.strip()
    ):
        raise IdentityError(
            f"{user!r} cannot be a user's name: it is empty, begins with #, or has : or a control "
            "character in it"
        )
    try:
        saslprep(password)
    except ValueError as error:
        raise IdentityError(f"the password of {user!r} cannot be used: {error}") from None
    if not password or "\0" in password:
        raise IdentityError(f"the password of {user!r} is empty, or has NUL in it")


def _is_hash(text: str) -> bool:
    parts = text.split("$")
    if len(parts) != 3 or parts[0] != _SCHEME:
        return False
    try:
        salt, key = (base64.b64decode(part, validate=True) for part in parts[1:])
    except ValueError:
        return False
    return len(salt) > 0 and len(key) == _KEY_SIZE


def read_secret_file(path: str | Path, what: str) -> str:
    """Return the text of a file that contains *what*.

    Raises:
        IdentityError: The file cannot be read.
    """
    try:
        return Path(path).read_text("utf-8")
    except OSError as error:
        raise IdentityError(
            f"cannot read {what} from {path}: {error.strerror}", condition="amqp:internal-error"
        ) from error
    except UnicodeDecodeError:
        raise IdentityError(f"cannot read {what} from {path}: it is not UTF-8") from None


def secret_of(text: str) -> str:
    """Return the secret in an option: *text* itself, or for ``@FILE`` the first line of the file.

    Raises:
        IdentityError: The file cannot be read, or the secret is empty.
    """
    if text.startswith("@"):
        lines = read_secret_file(text[1:], "a secret").splitlines()
        text = lines[0] if lines else ""
    if not text:
        raise IdentityError("a secret is empty")
    return text


def parse_user(text: str, *, environ: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Return name and password of ``--user``, which keeps the password off the command line.

    ``NAME:PASSWORD`` gives it directly; ``NAME:@FILE`` reads the first line of a file; ``NAME:-`` reads a
    line of standard input, without echo at a terminal; ``NAME`` alone uses the environment variable
    ``AMQP_RT_PASSWORD_NAME`` (upper case, other characters as ``_``). A password that begins with
    ``@``, or is ``-``, must come from a file or the environment.

    Raises:
        IdentityError: There is no password, or it or the name cannot be used.
    """
    name, colon, rest = text.partition(":")
    if not name:
        raise IdentityError(
            "a user is NAME:PASSWORD, NAME:@FILE, NAME:- or NAME; the name is empty"
        )
    if not colon:
        variable = "AMQP_RT_PASSWORD_" + re.sub(r"[^A-Z0-9]", "_", name.upper())
        if variable not in environ:
            raise IdentityError(f"no password for {name!r}: set {variable}, or use {name}:@FILE")
        password = environ[variable]
    elif rest == "-":
        if sys.stdin.isatty():
            password = getpass.getpass(f"Password for {name}: ")
        else:
            password = sys.stdin.readline().rstrip("\r\n")
    elif rest.startswith("@"):
        lines = read_secret_file(rest[1:], f"the password of {name!r}").splitlines()
        password = lines[0] if lines else ""
    else:
        password = rest
    _check_user(name, password)
    return name, password
