"""The data plane of one process: from columns to blocks to the backend of their fields, and back.

Which backend keeps a field is decided where it is written, by its route; the handle says it to
readers. A put may go to several backends, and a get may come from several.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

import torch

from tq_redis.config import DataConfig
from tq_redis.data.base import (
    Backend,
    Column,
    Content,
    EncodedBlock,
    Parser,
    Run,
    StoreUsage,
    WrittenBlock,
)
from tq_redis.data.calls import in_thread, to_the_end, together
from tq_redis.data.codec import NOT_COPIED, StoredBlock, decoded, encode, encoded, is_light
from tq_redis.deadline import Deadline
from tq_redis.errors import DataLostError, InputError

T = TypeVar("T")

# For undoing a put whose other half failed.
_UNDO_S = 5.0


class DataPlane:
    """All backends of one instance, each opened when it is first needed.

    Every call ends by its deadline: :class:`DeadlineError`.

    Args:
        config: routes of fields, and how columns are cut into blocks.
        backends: what opens each.
    """

    def __init__(self, config: DataConfig, backends: Mapping[str, Callable[[], Backend]]) -> None:
        self._config = config
        self._openers = backends
        self._open: dict[str, Backend] = {}
        self._routed: dict[str, str] = {}

    def backend(self, name: str) -> Backend:
        """The backend of this name.

        Raises:
            InputError: there is none.
            NotInitializedError: this process cannot reach it.
        """
        if name not in self._open:
            if name not in self._openers:
                raise InputError(
                    f"There is no backend {name!r}; its blocks cannot be read by this version."
                )
            self._open[name] = self._openers[name]()
        return self._open[name]

    def route(self, field: str) -> str:
        """The name of the backend that keeps a field."""
        if field not in self._routed:
            patterns = self._config.routes
            exact = patterns.get(field)
            found = (name for pattern, name in patterns.items() if fnmatchcase(field, pattern))
            self._routed[field] = exact or next(found, self._config.backend)
        return self._routed[field]

    async def start(self, deadline: Deadline) -> None:
        """Owner: make the instance ready, and findable by the processes that will attach to it."""
        await self._of_all(lambda backend: backend.start(deadline))

    async def put(
        self,
        partition: str,
        columns: Mapping[str, Column],
        deadline: Deadline,
        parser: Parser | str | None = None,
    ) -> list[WrittenBlock]:
        """Write the columns; when this returns, the blocks outlive the calling process.

        The stored bytes never alias the caller's tensors. ``requires_grad`` is dropped.

        Args:
            parser: makes the columns that are written from these. A backend that keeps all the
                fields may run it where the result is kept; one that has only a name must.

        Raises:
            InputError: a column cannot be stored; it names the field (and row). Or no backend runs
                what the name stands for.
            StoreFullError: a store had no room within the deadline. In either case nothing stays.
            Exception: what the parser raised.
        """
        if parser is not None:
            routes = {self.route(field) for field in columns}
            if len(routes) == 1:
                backend = self.backend(next(iter(routes)))
                written = await backend.parse(partition, columns, parser, deadline)
                if written is not None:
                    return written
            if isinstance(parser, str):
                raise InputError(
                    f"data_parser {parser!r} is a name, which storage units know: all fields of "
                    f"the put must be routed to zmq, these are to {sorted(routes)}. Give the "
                    f"function itself, or put the others apart",
                    partition=partition,
                    fields=columns,
                )
        config = self._config

        def cut() -> list[EncodedBlock]:
            return encode(
                columns if parser is None else parser(dict(columns)),
                block_bytes=config.block_bytes,
                allow_pickle=config.pickle,
                group_of=self.route,
            )

        light = parser is None and is_light(columns)
        blocks = cut() if light else await in_thread(deadline, NOT_COPIED, cut)
        return await self._write(partition, blocks, deadline)

    async def write_blocks(
        self, partition: str, contents: Sequence[Content], deadline: Deadline
    ) -> list[str]:
        """Write blocks that :meth:`read_blocks` gave, maybe of another backend, as new ones.

        Returns:
            Their handles, in this order.
        """
        written = await self._write(partition, [encoded(content) for content in contents], deadline)
        return [block.handle for block in written]

    async def get(
        self,
        wanted: Mapping[str, Sequence[Run]],
        deadline: Deadline,
        *,
        copy: bool = True,
        device: torch.device | None = None,
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
            device: an accelerator, with its number: tensors go there from the store's views. The
                copies are under way, in the order of the caller's stream, when this returns.

        Raises:
            DataLostError: blocks are gone; ``handles`` names them.
        """
        handles = dict.fromkeys(run[0] for runs in wanted.values() for run in runs)
        contents = await self._read(handles, deadline)
        blocks = {handle: StoredBlock(*content) for handle, content in contents.items()}
        return await decoded(
            wanted,
            blocks,
            deadline,
            copy=copy,
            allow_pickle=self._config.pickle,
            device=device,
        )

    async def read_blocks(self, handles: Sequence[str], deadline: Deadline) -> list[Content]:
        """Whole blocks, in this order; read-only views where the store allows it.

        Raises:
            DataLostError: blocks are gone; ``handles`` names them.
        """
        contents = await self._read(dict.fromkeys(handles), deadline)
        return [contents[handle] for handle in handles]

    async def delete(self, handles: Iterable[str], deadline: Deadline) -> None:
        """Free blocks. Idempotent; unknown handles are ignored. Views in use stay valid. Where some
        cannot be freed, the others are."""
        mine = _by_backend(self._known(handles))
        await to_the_end(self.backend(name).delete(names, deadline) for name, names in mine.items())

    async def confirm(self, handles: Iterable[str], deadline: Deadline) -> None:
        """Note that Redis names these blocks. Unknown handles are ignored."""
        await self._of_each(
            self._known(handles), lambda backend, names: backend.confirm(names, deadline)
        )

    async def unconfirmed(self, older_than: float, deadline: Deadline) -> dict[str, list[str]]:
        """Handles written more than ``older_than`` seconds ago and not confirmed, by partition."""
        found: dict[str, list[str]] = {}
        listed = await self._of_all(lambda backend: backend.unconfirmed(older_than, deadline))
        for names in listed:
            for partition, handles in names.items():
                found.setdefault(partition, []).extend(handles)
        return found

    async def usage(self, deadline: Deadline) -> list[StoreUsage]:
        """What every store keeps; those that do not answer are left out."""
        listed = await self._of_all(lambda backend: backend.usage(deadline))
        return [usage for usages in listed for usage in usages]

    async def shutdown(self, deadline: Deadline) -> None:
        """Owner: free all blocks of this instance, and end the stores that it started."""
        await self._of_all(lambda backend: backend.shutdown(deadline))

    async def close(self) -> None:
        """Let go of this process's client side; stores and blocks stay."""
        for backend in self._open.values():
            await backend.close()

    async def _write(
        self, partition: str, blocks: Sequence[EncodedBlock], deadline: Deadline
    ) -> list[WrittenBlock]:
        places: dict[str, list[int]] = {}
        for place, block in enumerate(blocks):
            places.setdefault(self.route(next(iter(block.schema))), []).append(place)
        handles = [""] * len(blocks)

        async def write(name: str, mine: list[int]) -> None:
            part = [blocks[place] for place in mine]
            for place, handle in zip(
                mine, await self.backend(name).write(partition, part, deadline), strict=True
            ):
                handles[place] = handle

        try:
            await together(write(name, mine) for name, mine in places.items())
        except BaseException:
            await self.delete([handle for handle in handles if handle], Deadline(_UNDO_S))
            raise
        return [block.written(handle) for block, handle in zip(blocks, handles, strict=True)]

    async def _read(self, handles: Iterable[str], deadline: Deadline) -> dict[str, Content]:
        contents: dict[str, Content] = {}
        lost: dict[str, str] = {}

        async def read(backend: Backend, names: list[str]) -> None:
            try:
                contents.update(await backend.read(names, deadline))
            except DataLostError as error:
                lost.update(dict.fromkeys(error.handles, error.message))

        await self._of_each(handles, read)
        if lost:
            raise DataLostError("; ".join(dict.fromkeys(lost.values())), handles=list(lost))
        return contents

    def _known(self, handles: Iterable[str]) -> list[str]:
        return [handle for handle in handles if handle.partition("/")[0] in self._openers]

    async def _of_each(
        self, handles: Iterable[str], call: Callable[[Backend, list[str]], Awaitable[None]]
    ) -> None:
        """Call the backend of each handle with its handles."""
        mine = _by_backend(handles)
        await together(call(self.backend(name), names) for name, names in mine.items())

    async def _of_all(self, call: Callable[[Backend], Awaitable[T]]) -> list[T]:
        """Call every backend that fields may be routed to."""
        names = dict.fromkeys([self._config.backend, *self._config.routes.values()])
        return await together(call(self.backend(name)) for name in names)


def _by_backend(handles: Iterable[str]) -> dict[str, list[str]]:
    mine: dict[str, list[str]] = {}
    for handle in handles:
        mine.setdefault(handle.partition("/")[0], []).append(handle)
    return mine
