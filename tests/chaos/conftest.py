"""Fixtures of the control plane's tests that are needed here too."""

from __future__ import annotations

from tests.control.conftest import start

__all__ = ["start"]
