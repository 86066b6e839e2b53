"""Prompts from verl's dataset to columns of a step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import datasets
import datasets.config
from omegaconf import DictConfig, ListConfig
from torchdata.stateful_dataloader import StatefulDataLoader
from verl import DataProto
from verl.trainer.ppo.utils import create_rl_dataset, create_rl_sampler
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.import_utils import load_extern_object

from tq_redis import ConfigError
from tq_redis.bridge import tqbridge

Columns = dict[str, list[Any]]


class Prompts:
    """Reads verl's dataset as the tasks need it.

    Args:
        config: the ``data`` block.
        tokenizer: of the model.
        processor: of a model that sees or hears; None for text.
        fields: the columns that some task reads. All of them are Python values, so the driver makes
            no tensor.
        cache: folder for the files that the datasets library writes.
    """

    def __init__(
        self,
        config: DictConfig,
        tokenizer: Any,
        processor: Any,
        fields: Collection[str],
        cache: Path,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._processor = processor
        self._fields = fields
        # The library takes its cache from the user's home unless told before the first use.
        datasets.config.HF_DATASETS_CACHE = cache

    def training(self) -> TrainingPrompts:
        """Batches to train on."""
        config = self._config
        dataset = self._load(config.train_files, config.train_max_samples)
        if len(dataset) < config.train_batch_size:
            raise ConfigError(
                f"{config.train_files} has {len(dataset)} prompts, a batch needs "
                f"{config.train_batch_size} (data.train_batch_size)"
            )
        sampler = _sampler(config, dataset)
        loader = StatefulDataLoader(
            dataset=dataset,
            batch_size=config.train_batch_size,
            num_workers=config.dataloader_num_workers,
            drop_last=True,
            collate_fn=collate_fn,
            sampler=sampler,
        )
        return TrainingPrompts(loader, dataset, sampler, self._columns)

    def held_out(self, files: Any, limit: int) -> list[Columns]:
        """All prompts of a set that is only evaluated, in batches of ``val_batch_size``.

        Args:
            files: of the set; None gives no batch.
            limit: rows at most, -1 for all.
        """
        if files is None:
            return []
        dataset = self._load(files, limit)
        size = self._config.val_batch_size or len(dataset)
        return [
            self._columns(collate_fn([dataset[row] for row in rows]))
            for rows in (
                range(start, min(start + size, len(dataset)))
                for start in range(0, len(dataset), size)
            )
        ]

    def _load(self, files: Any, limit: int) -> Any:
        paths = list(files) if isinstance(files, list | ListConfig) else [files]
        with redirect_stdout(StringIO()):  # verl prints what it does
            return create_rl_dataset(
                paths, self._config, self._tokenizer, self._processor, max_samples=limit
            )

    def _columns(self, batch: Mapping[str, Any]) -> Columns:
        return {name: list(batch[name]) for name in batch if name in self._fields}


class TrainingPrompts:
    """Batches of training prompts, epoch after epoch, from a place that can be saved.

    Args:
        loader: gives verl's batches.
        dataset: of the loader.
        sampler: of the loader.
        columns: makes the tasks' columns of a batch.

    Attributes:
        watchers: of the sampler and the dataset, where they want to see what became of each batch.
    """

    def __init__(self, loader: Any, dataset: Any, sampler: Any, columns: Any) -> None:
        self._loader = loader
        self._columns = columns
        found = ((sampler, "update"), (dataset, "on_batch_end"))
        self.watchers = [Watcher(*pair) for pair in found if hasattr(*pair)]

    def __len__(self) -> int:
        """Batches of an epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Columns]:
        while True:
            for batch in self._loader:
                yield self._columns(batch)

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch starts."""
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        self._loader.load_state_dict(state)


class Watcher:
    """Shows the samples of a step to an object of the driver's process.

    The object may name the columns that it wants in ``reads``; only those come to the driver.

    Args:
        wants: a curriculum sampler, say.
        name: of its method that takes ``batch``, a DataProto.
    """

    def __init__(self, wants: Any, name: str) -> None:
        show = getattr(wants, name)

        def see(data: DataProto) -> DataProto:
            show(batch=data)
            return DataProto()

        fields = getattr(wants, "reads", ("uid", "extra_info", "token_level_scores"))
        self.see = tqbridge(reads=fields, writes=())(see)


def _sampler(config: DictConfig, dataset: Any) -> Any:
    """verl's, or the user's: ``data.sampler`` names a class that takes the dataset and ``data``."""
    own = config.get("sampler") or {}
    if not own.get("path"):
        return create_rl_sampler(config, dataset)
    kind: Any = load_extern_object(own["path"], own["name"])
    return kind(dataset, config)
