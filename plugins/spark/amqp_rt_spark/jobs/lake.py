"""Tables of files that contain each micro-batch once, however often it is written.

Each commit of a Delta table records its query and batch, and a batch that is recorded is skipped. Without
deltalake (the extra ``lake``) the table is a folder of Parquet, in which each batch has a folder of its own,
overwritten when the batch is repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Literal

from .checkpoints import local_path
from .report import extra

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]
    from pyspark.sql import DataFrame, SparkSession

Format = Literal["delta", "parquet"]

#: Folder of Delta's log, and the columns by which the folders of a table are named.
_DELTA_LOG: Final = "_delta_log"
_QUERY: Final = "query_id"
_BATCH: Final = "batch_id"
_ADDRESS: Final = "address"


def format_of(table: str, wanted: Literal["auto", "delta", "parquet"] = "auto") -> Format:
    """Return the format of the table in the folder *table*; a new one is Delta if deltalake is installed.

    Raises:
        ValueError: The table has another format than *wanted*.
        MissingExtra: The format is Delta, and deltalake is not installed.
    """
    found: Format | None = None
    if (path := local_path(table)) is not None:
        if (path / _DELTA_LOG).is_dir():
            found = "delta"
        elif path.is_dir() and any(path.glob(f"{_QUERY}=*")):
            found = "parquet"
    if found is not None and wanted not in ("auto", found):
        raise ValueError(f"{table} is there already, as {found}: name another table")
    if wanted == "auto":
        wanted = found or ("delta" if find_spec("deltalake") else "parquet")
    if wanted == "delta":
        extra("deltalake", name="lake", wanted="tables of Delta")
    return wanted


def append_delta(
    table: str, rows: pa.Table, partition_by: Sequence[str], *, query: str, batch: int
) -> bool:
    """Append *rows*, batch number *batch* of *query*, to a Delta table, which is created if missing.

    Returns:
        Whether they were appended: False if the table has that batch already.
    """
    deltalake = extra("deltalake", name="lake", wanted="tables of Delta")
    try:
        there: Any = deltalake.DeltaTable(table)
    except deltalake.exceptions.TableNotFoundError:
        there = None
    if there is not None:
        last = there.transaction_version(query)
        if last is not None and last >= batch:
            return False
    noted = deltalake.CommitProperties(app_transactions=[deltalake.Transaction(query, batch)])
    deltalake.write_deltalake(
        table if there is None else there,
        _in_utc(rows),
        mode="append",
        partition_by=list(partition_by) or None,
        # Other options of the job, or another version of it, may add columns.
        schema_mode="merge",
        commit_properties=noted,
    )
    return True


def write_parquet(
    table: str, rows: DataFrame, partition_by: Sequence[str], *, query: str, batch: int
) -> None:
    """Write *rows*, batch number *batch* of *query*, into a folder of their own.

    Its path contains the query, because every query numbers its batches from 0.
    """
    folder = f"{table.rstrip('/')}/{_QUERY}={query}/{_BATCH}={batch}"
    rows.write.partitionBy(*partition_by).mode("overwrite").parquet(folder)


def read_table(spark: SparkSession, table: str) -> DataFrame:
    """Return the rows of a table that :func:`append_delta` or :func:`write_parquet` has made, as a DataFrame:
    of a Delta table its current version, without a jar.

    Raises:
        ValueError: The table is missing or empty.
        MissingExtra: It is a Delta table, and deltalake is not installed.
    """
    from pyspark.sql import functions as sql

    if format_of(table) == "delta":
        deltalake = extra("deltalake", name="lake", wanted="tables of Delta")
        try:
            there = deltalake.DeltaTable(table)
        except deltalake.exceptions.TableNotFoundError:
            raise ValueError(f"{table} is no table") from None
        files = there.file_uris()
        columns = there.metadata().partition_columns
        if not files:
            raise ValueError(f"{table} is empty")
        # In these URIs the table's folder is escaped, but the rest is as on disk: combine it with our folder.
        base = table.rstrip("/")
        depth = len(columns) + 1
        names = ("/".join(each.split("/")[-depth:]) for each in files)
        found = _read(spark, [f"{base}/{name}" for name in names], base)
        if _ADDRESS in columns:
            # Folder names hold UTF-8, of which Spark decodes each octet as one character.
            text = sql.decode(sql.encode(_ADDRESS, "ISO-8859-1"), "UTF-8")
            found = found.withColumn(_ADDRESS, text)
        return found
    return _read(spark, [table], table)


def _read(spark: SparkSession, paths: Sequence[str], base: str) -> DataFrame:
    """Read these files and folders. Addresses stay text, also those that look like numbers: they stand in
    the names of folders, from which Spark infers a type."""
    from pyspark.sql.types import StringType, StructField, StructType

    reader = spark.read.option("basePath", base).option("mergeSchema", "true")
    found = reader.parquet(*paths)
    kind = dict(found.dtypes).get(_ADDRESS, "string")
    if kind == "string":
        return found
    fields = [
        StructField(_ADDRESS, StringType()) if field.name == _ADDRESS else field
        for field in found.schema.fields
    ]
    return reader.schema(StructType(fields)).parquet(*paths)


def _in_utc(rows: pa.Table) -> pa.Table:
    """Return *rows* with times in UTC, as Delta stores them: Spark's are in the session's zone."""
    import pyarrow as pa

    return rows.cast(pa.schema([field.with_type(_utc(field.type)) for field in rows.schema]))


def _utc(kind: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    if pa.types.is_timestamp(kind):
        return pa.timestamp(kind.unit, "UTC")
    if pa.types.is_struct(kind):
        fields = (kind.field(number) for number in range(kind.num_fields))
        return pa.struct([field.with_type(_utc(field.type)) for field in fields])
    return kind
