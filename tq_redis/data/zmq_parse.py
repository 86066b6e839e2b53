"""Parsers of columns, run where their result is kept: in a storage unit that offers them."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from tq_redis.data.base import Column, WrittenBlock
from tq_redis.data.calls import in_thread
from tq_redis.data.codec import NOT_COPIED, encode, encoded
from tq_redis.data.zmq_placing import Placing
from tq_redis.data.zmq_units import ANSWER_S, UnitGoneError, Units
from tq_redis.deadline import Deadline
from tq_redis.errors import DeadlineError, InputError, ParserError, StoreFullError, TQError
from tq_redis.store import messages as m

# For giving a request up. A unit that takes longer does it nevertheless, when it comes to it.
_UNDO_S = 0.5


@dataclass(frozen=True)
class Parsing:
    """One put whose columns a unit makes.

    Args:
        parser: its name.
        columns: what it is given.
        block_bytes: about the largest block to make.
    """

    units: Units
    placing: Placing
    partition: str
    columns: Mapping[str, Column]
    parser: str
    block_bytes: int
    deadline: Deadline

    async def write(self) -> list[WrittenBlock]:
        """What was written.

        Raises:
            InputError: no unit offers the parser, a column cannot be sent, or the parser makes what
                cannot be kept.
            ParserError: it failed, or its unit ended. No other unit is tried then: it may have been
                the parser that ended this one.
            DeadlineError, StoreFullError: it was not done in time, or there was no room.
        """
        unit = await self.placing.with_parser(self.parser, self.partition, self.deadline)
        (block,) = await in_thread(
            self.deadline,
            NOT_COPIED,
            lambda: encode(self.columns, block_bytes=sys.maxsize, allow_pickle=False),
        )
        (parcel,), buffers = m.pack([block.content])
        left = self.deadline.remaining
        request = m.Parse(
            secrets.token_hex(8),
            self.partition,
            self.parser,
            parcel,
            self.block_bytes,
            min(left - min(0.1 * left, ANSWER_S), m.LONGEST_S),  # so that its answer is in time
        )
        try:
            reply, _ = await self.units.ask(unit, request, buffers, self.deadline, patient=False)
        except BaseException as error:
            await self.units.ask_all([unit], m.Drop([request.name]), Deadline(_UNDO_S))
            if isinstance(error, DeadlineError):
                raise self._late(unit) from error
            if isinstance(error, UnitGoneError | ConnectionRefusedError):
                raise self._error(
                    ParserError,
                    f"Storage unit {unit} ended while data_parser {self.parser!r} ran in it. "
                    f"Nothing was written; unless it was the parser that ended it, put again",
                ) from None
            raise
        if not isinstance(reply, m.Parsed):
            raise self._refusal(unit, reply)
        return [_written(unit, block) for block in reply.blocks]

    def _refusal(self, unit: str, reply: m.Reply) -> TQError:
        match reply:
            case m.Full(used, capacity):
                return self._error(
                    StoreFullError,
                    f"Storage unit {unit} has no room for what data_parser {self.parser!r} has "
                    f"made ({used} of {capacity} bytes are taken), and nothing was freed within "
                    f"the deadline of {self.deadline.seconds:g} s. Consume or clear, then retry, "
                    f"or start more units",
                )
            case m.Failed(reason, bad_input):
                return self._error(
                    InputError if bad_input else ParserError,
                    f"data_parser {self.parser!r} failed in storage unit {unit}, and nothing was "
                    f"written: {reason}",
                )
            case _:
                return self._late(unit)

    def _late(self, unit: str) -> TQError:
        return self._error(
            DeadlineError,
            f"data_parser {self.parser!r} did not end in storage unit {unit} within the deadline "
            f"of {self.deadline.seconds:g} s, or the unit hangs. Nothing was written; put fewer "
            f"rows at once, or give a longer timeout",
        )

    def _error(self, kind: type[TQError], message: str) -> TQError:
        late = self.deadline.seconds if issubclass(kind, DeadlineError) else None
        return kind(message, partition=self.partition, fields=self.columns, deadline=late)


def _written(unit: str, block: m.ParsedBlock) -> WrittenBlock:
    known = encoded((block.header, ()))
    handle = f"zmq/{unit}/{block.name}"
    return WrittenBlock(handle, known.schema, block.first_row, known.rows, block.nbytes)
