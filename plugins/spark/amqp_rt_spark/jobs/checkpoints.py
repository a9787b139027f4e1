"""Read Spark's checkpoints: how far a query has planned, and how far it has committed.

A checkpoint is a folder: ``metadata`` names the query, ``offsets/N`` holds the end of batch N, written before
the batch begins, and ``commits/N`` is written once it is done. One on this machine is read without Spark; one
elsewhere needs a session, which has access to its file system.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from msgspec import Struct

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")


class Checkpoint(Struct, frozen=True):
    """Progress of a query.

    Attributes:
        query: Id of the query.
        planned: Number of the last planned batch, None if there is none.
        committed: Number of the last committed batch, None if there is none.
        begun: End offsets of the planned batch, one for each source of the query; empty for a source
            of another format, or without an offset yet.
        done: End offsets of the committed batch, likewise.
    """

    query: str
    planned: int | None
    committed: int | None
    begun: tuple[dict[str, Any], ...] = ()
    done: tuple[dict[str, Any], ...] = ()


def local_path(folder: str) -> Path | None:
    """Return *folder* as a path of this machine, None if it is elsewhere."""
    if not _SCHEME.match(folder):
        return Path(folder)
    url = urlsplit(folder)
    return Path(unquote(url.path)) if url.scheme == "file" and not url.netloc else None


def read_checkpoint(folder: str, spark: SparkSession | None = None) -> Checkpoint:
    """Read the checkpoint in *folder*; *spark* is used for one that is not on this machine.

    Raises:
        ValueError: There is no checkpoint, or it cannot be read.
    """
    path = local_path(folder)
    files = _Elsewhere(folder, spark) if path is None else _Here(path)
    try:
        query = str(json.loads(files.text("metadata"))["id"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{folder} is no checkpoint: it has no file metadata of Spark") from None
    planned = max(files.numbers("offsets"), default=None)
    committed = max(files.numbers("commits"), default=None)
    return Checkpoint(
        query,
        planned,
        committed,
        () if planned is None else _offsets(files, planned),
        () if committed is None else _offsets(files, committed),
    )


class _Here:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def text(self, name: str) -> str:
        return (self._folder / name).read_text("utf-8")

    def numbers(self, name: str) -> list[int]:
        folder = self._folder / name
        if not folder.is_dir():
            return []
        return [int(each.name) for each in folder.iterdir() if each.name.isdecimal()]


class _Elsewhere:
    def __init__(self, folder: str, spark: SparkSession | None) -> None:
        if spark is None:
            raise ValueError(f"{folder} is not on this machine: reading it takes a session")
        self._folder = folder.rstrip("/")
        self._spark = spark

    def text(self, name: str) -> str:
        from pyspark.errors import PySparkException

        try:
            rows = self._spark.read.text(f"{self._folder}/{name}", wholetext=True).collect()
        except PySparkException as error:
            raise OSError(str(error)) from error
        return str(rows[0][0]) if rows else ""

    def numbers(self, name: str) -> list[int]:
        from pyspark.errors import PySparkException

        try:
            rows = (
                self._spark.read.format("binaryFile")
                .load(f"{self._folder}/{name}")
                .select("path")
                .collect()
            )
        except PySparkException:
            return []
        names = (str(row[0]).rpartition("/")[2] for row in rows)
        return [int(each) for each in names if each.isdecimal()]


def _offsets(files: _Here | _Elsewhere, number: int) -> tuple[dict[str, Any], ...]:
    """Return the offsets in ``offsets/NUMBER``: a version, a line about the batch, and a line for each source."""
    try:
        version, _, *lines = files.text(f"offsets/{number}").splitlines()
        if version != "v1":
            raise ValueError(f"it has the version {version!r:.20}")
        found = [None if line == "-" else json.loads(line) for line in lines]
    except (OSError, ValueError) as error:
        raise ValueError(f"the checkpoint's offsets/{number} cannot be read: {error}") from None
    return tuple(
        each if isinstance(each, dict) and each.keys() & {"logs", "leases"} else {}
        for each in found
    )
