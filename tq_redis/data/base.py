"""Where the bytes are: what a backend must offer.

A put writes *columns* (one per field, B rows each) as *blocks*. A block holds some of the fields
for a run of consecutive rows of that put. The control plane keeps, per row and field, the block's
*handle* and the row's place in it; a reader hands those back as runs. Nothing here knows Redis.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from tq_redis.deadline import Deadline
from tq_redis.metadata.schema import FieldSchema
from tq_redis.store.shelf import Content

__all__ = [
    "Backend",
    "Column",
    "Content",
    "EncodedBlock",
    "Parser",
    "Run",
    "StoreUsage",
    "WrittenBlock",
]

Column = torch.Tensor | list[Any]
"""B rows of one field: a tensor (dense with dim 0 = B, or nested with B components) or a list of
B values of any kind."""

Parser = Callable[[dict[str, Column]], dict[str, Column]]
"""Makes the columns that are kept from those that are put: the same fields, the same rows."""

Run = tuple[str, int, int]
"""(handle of a block, first row inside the block, number of rows)."""


@dataclass(frozen=True, slots=True)
class WrittenBlock:
    """One block that a put wrote.

    Attributes:
        handle: opaque text that finds the block again; it goes into Redis.
        schema: the form of each field that the block holds.
        first_row: the row of the put that is the block's row 0.
        rows: number of rows.
        nbytes: bytes of the stored rows, without the header.
    """

    handle: str
    schema: Mapping[str, FieldSchema]
    first_row: int
    rows: int
    nbytes: int

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that the block holds."""
        return tuple(self.schema)


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """A block that is ready to be stored.

    Attributes:
        schema: the form of each field that it holds.
        first_row: the row of the put that is its row 0.
        rows: number of rows.
        header: msgpack.
        buffers: flat arrays; they may share memory with the caller's tensors.
    """

    schema: Mapping[str, FieldSchema]
    first_row: int
    rows: int
    header: bytes
    buffers: Sequence[npt.NDArray[Any]]

    @property
    def nbytes(self) -> int:
        """Bytes of the rows, without the header."""
        return sum(buffer.nbytes for buffer in self.buffers)

    @property
    def content(self) -> Content:
        """As a store keeps it."""
        return self.header, self.buffers

    def written(self, handle: str) -> WrittenBlock:
        """What is known of it once it is stored."""
        return WrittenBlock(handle, self.schema, self.first_row, self.rows, self.nbytes)


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """What one store keeps.

    Attributes:
        store: its name: the backend, and the node or storage unit.
        blocks: how many.
        used: bytes that they take.
        capacity: bytes that they may take; None: no limit.
    """

    store: str
    blocks: int
    used: int
    capacity: int | None


class Backend(ABC):
    """One kind of store, seen from one process. Every call ends by its deadline.

    Handles begin with the backend's name, as in the settings, and a slash.

    Raises (all calls): DeadlineError when the deadline passed.
    """

    @abstractmethod
    async def start(self, deadline: Deadline) -> None:
        """Owner: make the stores ready, and findable by the processes that will attach."""

    @abstractmethod
    async def write(
        self, partition: str, blocks: Sequence[EncodedBlock], deadline: Deadline
    ) -> list[str]:
        """Keep blocks, all or none; when this returns, they outlive the calling process.

        What is stored never aliases the buffers.

        Returns:
            Their handles, in this order.

        Raises:
            StoreFullError: there was no room within the deadline.
            InputError: there never will be. Nothing was written, in either case.
        """

    async def parse(
        self,
        partition: str,
        columns: Mapping[str, Column],
        parser: Parser | str,
        deadline: Deadline,
    ) -> list[WrittenBlock] | None:
        """Run a parser where its result is kept, and keep it.

        Args:
            parser: a function, or the name of one that the stores have.

        Returns:
            What was written; None: the stores do not run this kind of parser.

        Raises:
            What the parser raised, and what :meth:`write` raises.
        """
        return None

    @abstractmethod
    async def read(self, handles: Sequence[str], deadline: Deadline) -> dict[str, Content]:
        """Distinct blocks by handle; read-only views where the store allows it.

        Raises:
            DataLostError: blocks are gone for good; ``handles`` names them.
        """

    @abstractmethod
    async def delete(self, handles: Iterable[str], deadline: Deadline) -> None:
        """Free blocks. Idempotent; unknown handles are ignored. Views in use stay valid."""

    @abstractmethod
    async def unconfirmed(self, older_than: float, deadline: Deadline) -> dict[str, list[str]]:
        """Handles written more than ``older_than`` seconds ago and not confirmed, by partition."""

    @abstractmethod
    async def confirm(self, handles: Iterable[str], deadline: Deadline) -> None:
        """Note that Redis names these blocks. Unknown handles are ignored."""

    @abstractmethod
    async def usage(self, deadline: Deadline) -> list[StoreUsage]:
        """What every store keeps; those that do not answer are left out."""

    @abstractmethod
    async def shutdown(self, deadline: Deadline) -> None:
        """Owner: free all blocks of this instance, and end the stores that it started."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of this process's client side; stores and blocks stay."""
