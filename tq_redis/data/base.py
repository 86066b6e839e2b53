"""Where the bytes are: what a backend must offer.

A put writes *columns* (one per field, B rows each) as *blocks*. A block holds some of the fields
for a run of consecutive rows of that put. The control plane keeps, per row and field, the block's
*handle* and the row's place in it; a reader hands those back as runs. Nothing here knows Redis.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from tq_redis.deadline import Deadline

Column = torch.Tensor | list[Any]
"""B rows of one field: a tensor (dense with dim 0 = B, or nested with B components) or a list of
B values of any kind."""

Run = tuple[str, int, int]
"""(handle of a block, first row inside the block, number of rows)."""


Content = tuple[bytes, Sequence[npt.NDArray[Any]]]
"""A block bit by bit, whatever it holds: header and flat buffers, as the codec made them."""


@dataclass(frozen=True, slots=True)
class WrittenBlock:
    """One block that a put wrote.

    Attributes:
        handle: opaque text that finds the block again; it goes into Redis.
        fields: the fields that the block holds.
        first_row: the row of the put that is the block's row 0.
        rows: number of rows.
        nbytes: bytes of the stored rows, without the header.
    """

    handle: str
    fields: tuple[str, ...]
    first_row: int
    rows: int
    nbytes: int


class DataPlane(ABC):
    """One backend, seen from one process. Every call ends by its deadline.

    Raises (all calls): DeadlineError when the deadline passed.
    """

    @abstractmethod
    async def start(self, deadline: Deadline) -> None:
        """Owner: make the instance ready, and findable by the processes that will attach to it."""

    @abstractmethod
    async def put(
        self, partition: str, columns: Mapping[str, Column], deadline: Deadline
    ) -> list[WrittenBlock]:
        """Write the columns; when this returns, the blocks outlive the calling process.

        The stored bytes never alias the caller's tensors. ``requires_grad`` is dropped.

        Raises:
            InputError: a column cannot be stored; it names the field (and row). Nothing was
                written.
        """

    @abstractmethod
    async def get(
        self, wanted: Mapping[str, Sequence[Run]], deadline: Deadline, *, copy: bool = True
    ) -> dict[str, Column]:
        """The rows of each field, in the order of its runs (rows may repeat, in any order).

        Rows come back as they were put. Where the runs of one field come from puts of different
        form: dense rows of unequal shape become jagged, jagged with strided becomes strided, and
        what no tensor can hold together (other dtypes, other ranks, tensors with values) becomes
        a list.

        Args:
            wanted: field -> runs; at least one row each. A block is fetched once, however many
                fields and runs name it.
            copy: True gives private, writable memory. False gives read-only views of the store
                for tensor fields whose rows lie side by side in one block (writing to them is
                undefined: it may change what others read), and private memory for the rest.

        Raises:
            DataLostError: blocks are gone; ``handles`` names them.
        """

    @abstractmethod
    async def read_blocks(self, handles: Sequence[str], deadline: Deadline) -> list[Content]:
        """Whole blocks, in this order; read-only views where the store allows it.

        Raises:
            DataLostError: blocks are gone; ``handles`` names them.
        """

    @abstractmethod
    async def write_blocks(
        self, partition: str, contents: Sequence[Content], deadline: Deadline
    ) -> list[str]:
        """Write blocks that :meth:`read_blocks` gave, maybe of another backend, as new ones.

        Returns:
            Their handles, in this order.
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
    async def shutdown(self, deadline: Deadline) -> None:
        """End the stores of this instance, with all their blocks. For the owner only."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of this process's client side; stores and blocks stay."""
