"""Which package the tests of this folder look at.

``TQ_TEST_PACKAGE=transfer_queue`` runs them against TransferQueue itself, in an environment that
has it: what they say of both is then shown to be true of both.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
from tensordict import NonTensorStack

PACKAGE = os.environ.get("TQ_TEST_PACKAGE", "tq_redis")
IS_PEER = PACKAGE == "transfer_queue"

tq: Any = importlib.import_module("transfer_queue" if IS_PEER else "tq_redis.compat.transfer_queue")


stack: Any = NonTensorStack  # typed in part


def differs(reason: str) -> pytest.MarkDecorator:
    """Ours is meant to be different here."""
    return pytest.mark.skipif(IS_PEER, reason=f"transfer_queue: {reason}")
