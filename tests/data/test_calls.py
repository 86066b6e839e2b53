"""Many calls at once, of which some fail."""

from __future__ import annotations

import asyncio

import pytest

from tq_redis.data.calls import to_the_end


async def fail(message: str) -> None:
    raise ValueError(message)


@pytest.mark.asyncio
async def test_a_call_that_fails_does_not_keep_the_others_from_their_ends() -> None:
    done: list[str] = []

    async def slow() -> None:
        await asyncio.sleep(0)
        done.append("slow")

    with pytest.raises(ValueError, match="first"):
        await to_the_end([fail("first"), slow(), fail("second")])
    assert done == ["slow"]
