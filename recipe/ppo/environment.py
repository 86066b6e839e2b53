"""Environment variables that verl, Ray and transformers read when they are imported."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from types import MappingProxyType

DEFAULTS: Mapping[str, str] = MappingProxyType(
    {
        "VERL_USE_EXTERNAL_MODULES": "recipe.cpu",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        # No token file in the home folder: this Ray listens for this machine only.
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
)


# Said at each start, whatever the configuration.
_NO_NEWS = (
    ".* engine is not available",
    "Disabled critic as algorithm.adv_estimator != gae",
    "'set_vital' is deprecated",
)


def prepare_environment() -> None:
    """Set those that are not set. Call this before the first import of verl or Ray."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    for message in _NO_NEWS:
        warnings.filterwarnings("ignore", message=message)
