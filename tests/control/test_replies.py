from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.control.state import Admin
from tq_redis.control.replies import (
    ClaimReply,
    ClearPartitionReply,
    ClearSamplesReply,
    DescribeReply,
    LocateReply,
    MarkLostReply,
    ProduceReply,
    Reply,
    SwapOwnerReply,
    decode,
)

KINDS: list[type[Reply]] = [
    ClaimReply, ClearPartitionReply, ClearSamplesReply, DescribeReply, LocateReply, MarkLostReply,
    ProduceReply, Reply, SwapOwnerReply,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_refusal_needs_no_more_than_its_code(kind: type[Reply]) -> None:
    assert decode(msgspec.msgpack.encode({"code": "unknown", "ids": [1, 2]}), kind) == kind(
        "unknown", [1, 2]
    )


@pytest.mark.parametrize(
    ("lua", "kind", "reply"),
    [
        ("{ code = 'ok', ids = {} }", ClaimReply, ClaimReply("ok")),
        ("{ code = 'ok', ids = { 2^53 - 1 } }", ClaimReply, ClaimReply("ok", [2**53 - 1])),
        (
            "{ code = 'ok', tags = { { 'a', '[1]', '10' } }, schema = { '{}' } }",
            ClaimReply,
            ClaimReply("ok", schema=["{}"], tags=[("a", "[1]", "10")]),
        ),
        (
            "{ code = 'ok', columns = { { 1, 0, 2 }, 1, {} }, blocks = { { 1, 'h' } } }",
            LocateReply,
            LocateReply("ok", columns=[[1, 0, 2], 1, []], blocks=[(1, "h")]),
        ),
        (
            "{ code = 'ok', fields = { { 'x', '', '01' } }, more = true }",
            DescribeReply,
            DescribeReply("ok", fields=[("x", "", "01")], more=True),
        ),
    ],
)
def test_what_lua_packs_is_read_as_it_was_meant(
    admin: Admin, redis_url: str, lua: str, kind: type[Reply], reply: Reply
) -> None:
    """Empty tables are lists; whole numbers are integers."""
    packed: Any = admin.eval(f"return cmsgpack.pack({lua}):gsub('.', function(c) return "
                             f"string.format('%02x', c:byte()) end)", 0)  # fmt: skip
    assert decode(bytes.fromhex(packed), kind) == reply


def test_a_reply_of_another_form_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(msgspec.msgpack.encode({"code": "ok", "ids": "no list"}), Reply)
