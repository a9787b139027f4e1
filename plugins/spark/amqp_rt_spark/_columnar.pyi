from collections.abc import Callable, Sequence
from typing import Any

class Table:
    def __new__(
        cls,
        columns: Sequence[str],
        rows: int,
        octets: int,
        text: bool,
        all_json: bool,
        parse: Callable[[bytes], tuple[bytes, bytes] | None],
        hidden: Sequence[bytes],
    ) -> Table: ...
    @property
    def rows(self) -> int: ...
    @property
    def full(self) -> bool: ...
    def fill(
        self,
        payloads: list[bytes],
        start: int,
        stop: int,
        offsets: list[int] | None,
        address: str,
        partition: int | None,
        times: list[int] | None = None,
    ) -> int: ...
    def take(self) -> tuple[int, list[tuple[Any, ...]]]: ...

def numbers(payloads: list[bytes]) -> list[int | None]: ...
def records(batch: bytes) -> tuple[list[int], list[int], list[bytes]]: ...
