"""How the columns of a step travel: through the queue, or through the driver. Chosen at start."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

import tq_redis as tq
from recipe.ppo.plain_step import PlainStep
from recipe.ppo.queue_step import QueueStep
from recipe.ppo.step import Step
from tq_redis.samplers import BaseSampler, GRPOGroupNSampler, Sampler, SequentialSampler


class Plane(ABC):
    """Makes steps."""

    @abstractmethod
    def step(self, name: str, *, training: bool = False) -> Step:
        """A step to put samples into.

        Args:
            name: of the step.
            training: the samples are trained on, and their tasks get them in the sampler's order.
        """

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
    """Through the queue.

    Args:
        client: of the queue.
        settings: the block ``tq_redis.step`` of the configuration.

    Raises:
        ConfigError: the sampler cannot be made, or is not one for whole batches.
    """

    def __init__(self, client: tq.Client, settings: DictConfig) -> None:
        self._client = client
        self._lease_s: float | None = settings.lease_s
        self._sampler = make_sampler(settings.sampler)
        self._left: str | None = None

    def step(self, name: str, *, training: bool = False) -> QueueStep:
        return QueueStep(
            self._client,
            name,
            lease_s=self._lease_s,
            sampler=self._sampler if training else None,
            left=name == self._left,
        )

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
        self._left = name if name in partitions else None
        return self._left is not None


class PlainPlane(Plane):
    """Through the driver; a step that a crash ended begins anew."""

    def step(self, name: str, *, training: bool = False) -> PlainStep:
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
        yield QueuePlane(tq.get_client(), step)
    finally:
        tq.close()


def make_sampler(settings: DictConfig) -> Sampler:
    """The sampler that ``tq_redis.step.sampler`` describes, as Hydra describes objects.

    Raises:
        ConfigError: it cannot be made, or is not one for whole batches.
    """
    try:
        sampler: Any = instantiate(settings)
    except InstantiationException as error:
        raise tq.ConfigError(f"tq_redis.step.sampler cannot be made: {error}") from error
    if not isinstance(sampler, SequentialSampler | GRPOGroupNSampler | BaseSampler):
        raise tq.ConfigError(
            f"tq_redis.step.sampler is a {type(sampler).__name__}, which chooses for one rank; a "
            "task takes the whole step here. Give tq_redis.samplers.SequentialSampler, "
            "GRPOGroupNSampler or a BaseSampler of yours; trainer.balance_batch balances the ranks."
        )
    return sampler


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
