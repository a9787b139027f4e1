"""Certificate of the fixture, for 127.0.0.1 and localhost, made when it is first needed."""

from __future__ import annotations

import tempfile
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from amqp_rt import ServerTls

_AUTHORITY: Final = "authority.pem"
_SERVER: Final = "server.pem"


class _Files:
    """Files of the certificate of this process, removed at its end."""

    def __init__(self) -> None:
        self._making = threading.Lock()
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def folder(self) -> Path:
        """Return their folder; they are made by the first call."""
        with self._making:
            if self._folder is None:
                # The import takes a tenth of a second, which most tests do not need to wait for.
                import trustme

                folder = tempfile.TemporaryDirectory(prefix="amqp_rt_servicebus-")
                authority = trustme.CA()
                authority.cert_pem.write_to_path(f"{folder.name}/{_AUTHORITY}")
                certificate = authority.issue_cert("localhost", "127.0.0.1")
                certificate.private_key_and_cert_chain_pem.write_to_path(f"{folder.name}/{_SERVER}")
                self._folder = folder
            return Path(self._folder.name)


_files: Final = _Files()


def can_make() -> bool:
    """Return whether certificates can be made, for which trustme has to be installed."""
    return find_spec("trustme") is not None


class OwnCertificate(ServerTls):
    """Certificate that is made when the first client begins TLS, or when the file of its authority is asked for."""

    def __init__(self) -> None:
        # The options of a certificate are given when there is one.
        self._loaded = False

    @property
    def ca_file(self) -> str:
        """PEM file of the authority, which clients have to trust."""
        return str(_files.folder() / _AUTHORITY)

    def layer(self) -> Any:
        """Create the TLS layer of one connection."""
        if not self._loaded:
            super().__init__(_files.folder() / _SERVER)
            self._loaded = True
        return super().layer()

    def __repr__(self) -> str:
        return "OwnCertificate()"
