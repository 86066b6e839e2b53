"""A CPU platform for verl 0.9.1, which itself knows CUDA and NPU.

verl imports this package at ``import verl`` in every process in which the environment variable
``VERL_USE_EXTERNAL_MODULES`` names it. Nothing changes on a machine with an accelerator: the
platform is then registered, but not chosen.
"""

from recipe.cpu.platform import CPUPlatform

__all__ = ["CPUPlatform"]
