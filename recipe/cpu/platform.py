"""verl's view of the CPU as a device."""

from __future__ import annotations

import resource
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class CPUModule(ModuleType):
    """What verl asks of ``torch.cuda`` and ``torch.cpu`` does not have."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, device: int | None = None) -> str:
        return "CPU"

    def empty_cache(self) -> None:
        """The CPU allocator has no cache to empty."""

    def memory_allocated(self, device: int | None = None) -> int:
        return 0

    def memory_reserved(self, device: int | None = None) -> int:
        return 0

    def max_memory_reserved(self, device: int | None = None) -> int:
        return 0

    def max_memory_allocated(self, device: int | None = None) -> int:
        """Peak resident set of this process in bytes."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def mem_get_info(self, device: int | None = None) -> tuple[int, int]:
        return 0, 0

    def reset_peak_memory_stats(self, device: int | None = None) -> None:
        """The kernel's peak cannot be reset."""

    def get_rng_state(self, device: int | None = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: int | None = None) -> None:
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)


_MODULE = CPUModule("recipe.cpu.module")


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    """Chosen by verl where there is no accelerator; collectives run on gloo."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return _MODULE

    def is_available(self) -> bool:
        return not torch.cuda.is_available()

    def current_device(self) -> Any:
        # verl passes this to tensor.to(): a number would mean an accelerator.
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """There is one CPU device."""

    def synchronize(self, device_index: int | None = None) -> None:
        """CPU operators are synchronous."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """The CPU allocator has none."""

    def empty_cache(self) -> None:
        """The CPU allocator has no cache to empty."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return nullcontext()

    def profiler_start(self) -> None:
        """No device profiler."""

    def profiler_stop(self) -> None:
        """No device profiler."""

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        """Of a training process. Ray has an argument of its own for the resource CPU."""
        return {"num_cpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
