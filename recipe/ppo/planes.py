"""How the columns of a step travel: through the queue, or through the driver. Chosen at start."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import ray
from omegaconf import DictConfig, OmegaConf

import tq_redis as tq
from recipe.ppo.plain_step import PlainStep
from recipe.ppo.queue_step import QueueStep
from recipe.ppo.step import Step


class Plane(ABC):
    """Makes steps."""

    @abstractmethod
    def step(self, name: str) -> Step:
        """A step to put samples into."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Keep what the steps that are not at their end have, in a folder that need not exist."""

    @abstractmethod
    def resume(self, name: str, folder: Path | None) -> bool:
        """Forget all steps but the one called ``name``.

        Args:
            name: of the step that comes next.
            folder: as given to :meth:`save`; read where the step is not there any more.

        Returns:
            Whether the step has samples already.
        """


class QueuePlane(Plane):
    """Through the queue."""

    def __init__(self, client: tq.Client, lease_s: float | None) -> None:
        self._client = client
        self._lease_s = lease_s

    def step(self, name: str) -> QueueStep:
        return QueueStep(self._client, name, self._lease_s)

    def save(self, folder: Path) -> None:
        self._client.save_checkpoint(folder)

    def resume(self, name: str, folder: Path | None) -> bool:
        partitions = self._client.get_partition_list()
        if name not in partitions and folder is not None and folder.exists():
            self._client.load_checkpoint(folder)
            partitions = self._client.get_partition_list()
        for partition in partitions:
            if partition != name:
                self._client.clear_partition(partition)
        return name in partitions


class PlainPlane(Plane):
    """Through the driver; a step that a crash ended begins anew."""

    def step(self, name: str) -> PlainStep:
        return PlainStep(name)

    def save(self, folder: Path) -> None:
        """Nothing outlives the driver."""

    def resume(self, name: str, folder: Path | None) -> bool:
        """Nothing outlived the driver."""
        return False


@contextmanager
def open_plane(settings: DictConfig) -> Generator[Plane]:
    """The plane that the block ``tq_redis`` of the configuration asks for, in a running Ray."""
    step = settings.step
    if not step.queue:
        yield PlainPlane()
        return
    try:
        tq.init(queue_settings(settings))
        _announce()
        yield QueuePlane(tq.get_client(), step.lease_s)
    finally:
        tq.close()


def queue_settings(settings: DictConfig) -> DictConfig:
    """The block without what is the trainer's."""
    return OmegaConf.masked_copy(settings, [str(name) for name in settings if name != "step"])


def _announce() -> None:
    """Say how to look into the running job."""
    print(
        f"watch step 1 (the number in the key is the step's):\n  {tq.progress_command('train_1')}\n"
        f"attach from Python: RAY_ADDRESS={ray.get_runtime_context().gcs_address} "
        "RAY_AUTH_MODE=disabled",
        flush=True,
    )
