"""Tests that need an accelerator run where there is one, and where they are asked for."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without an accelerator, deselect what is marked ``gpu``. ``-m gpu`` runs it in any case, so
    that it fails where it was expected to run."""
    if torch.accelerator.is_available() or "gpu" in str(config.getoption("markexpr")):
        return
    needing = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=needing)
    items[:] = [item for item in items if item not in needing]
