"""What of a saved state is written when it is loaded. Pure functions.

Consumers of the old run are gone: what they held with a lease, and had not acknowledged, is open
again. How often it was delivered is kept. So are draws, if their claims had ended. Limits are those
of the new run. Ready indexes are not in a checkpoint; the first claim that needs one builds it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tq_redis.checkpoint.files import Page

# Claims that an earlier run made after it had saved have lower numbers than new ones.
_SKIPPED_CLAIMS = 1_000_000_000


class Restored:
    """The pages of one partition, in the order in which they were saved.

    Args:
        generation: of the partition that is made.
    """

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._open_claims: dict[str, set[str]] = {}
        self._claims_of_draws: dict[str, set[str]] = {}

    def items(self, page: Page) -> list[str]:
        """What is to be written of a page; empty if nothing."""
        kind, _, name = page.suffix.partition(":")
        pairs = [] if page.type != "hash" else _pairs(page.items)
        if page.suffix == "":
            return self._summary(pairs)
        if kind == "claims":
            self._open_claims.setdefault(name, set()).update(number for number, _ in pairs)
            return []
        if kind == "task":
            return _flat([pair for pair in pairs if not pair[1].startswith("leased:")])
        if kind == "draws":
            return self._draws(name, pairs)
        if kind == "drawn":
            kept = self._claims_of_draws.get(name, set())
            return _flat([pair for pair in pairs if pair[0] in kept])
        if kind == "making":
            return []
        if kind == "indexes":
            return _flat([(name, _not_built(text)) for name, text in pairs])
        return page.items

    def _draws(self, task: str, pairs: Sequence[tuple[str, str]]) -> list[str]:
        still_open = self._open_claims.get(task, set())
        claims = {name: set(msgspec.json.decode(text)["claims"]) for name, text in pairs}
        kept = [pair for pair in pairs if not claims[pair[0]] & still_open]
        self._claims_of_draws.setdefault(task, set()).update(*(claims[name] for name, _ in kept))
        return _flat(kept)

    def _summary(self, pairs: Sequence[tuple[str, str]]) -> list[str]:
        summary = {
            name: value
            for name, value in pairs
            if not name.startswith("claimed:") and name not in ("expires_at", "limits")
        }
        summary["generation"] = str(self._generation)
        summary["claims"] = str(int(summary.get("claims", 0)) + _SKIPPED_CLAIMS)
        return _flat(list(summary.items()))


def with_handle(text: str, handle: str) -> str:
    """The record of a block that was stored again."""
    return msgspec.json.encode(msgspec.json.decode(text) | {"handle": handle}).decode()


def _pairs(items: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(items[::2], items[1::2], strict=True))


def _flat(pairs: Sequence[tuple[str, str]]) -> list[str]:
    return [text for pair in pairs for text in pair]


def _not_built(index: str) -> str:
    return msgspec.json.encode(msgspec.json.decode(index) | {"built": 0, "done": False}).decode()
