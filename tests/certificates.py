"""Certificates for tests, made once per process."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

import trustme


class Certificates:
    """An authority and certificates signed by it, as files in a folder that is removed at exit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = trustme.CA()
        self.ca = folder / "ca.pem"
        self.authority.cert_pem.write_to_path(self.ca)
        #: For localhost; certificate and key in one file.
        self.server = self.issue("localhost", "127.0.0.1")
        self.client = self.issue("client.example.org", common_name="ada")
        stranger = trustme.CA()
        #: An authority that is not trusted, and a certificate signed by it.
        self.other_ca = folder / "other.pem"
        stranger.cert_pem.write_to_path(self.other_ca)
        self.stranger = folder / "stranger.pem"
        stranger.issue_cert(
            "localhost", common_name="mallory"
        ).private_key_and_cert_chain_pem.write_to_path(self.stranger)

    def issue(self, *names: str, common_name: str | None = None) -> Path:
        """Issue a certificate; return the file with it and its key."""
        leaf = self.authority.issue_cert(*names, common_name=common_name)
        path = self.folder / f"{names[0]}-{common_name}.pem"
        leaf.private_key_and_cert_chain_pem.write_to_path(path)
        return path


@lru_cache(maxsize=1)
def certificates() -> Certificates:
    """Return the certificates of this process."""
    folder = Path(tempfile.mkdtemp(prefix="amqp-rt-tls-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Certificates(folder)
