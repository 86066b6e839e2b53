"""Prompts from verl's dataset to columns of the queue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import datasets
import datasets.config
from omegaconf import DictConfig
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.utils import create_rl_dataset, create_rl_sampler
from verl.utils.dataset.rl_dataset import collate_fn

# What the workers need of a row. All of it is text, so the driver makes no tensor.
_COLUMNS = ("raw_prompt", "data_source", "reward_model", "extra_info")

Columns = dict[str, list[Any]]


class TrainingPrompts:
    """Batches of training prompts, epoch after epoch, from a place that can be saved.

    Args:
        config: the ``data`` block.
        tokenizer: of the model.
        cache: folder for the files that the datasets library writes.
    """

    def __init__(self, config: DictConfig, tokenizer: Any, cache: Path) -> None:
        dataset = _load(config.train_files, config, tokenizer, cache, config.train_max_samples)
        if len(dataset) < config.train_batch_size:
            raise ValueError(
                f"{config.train_files} has {len(dataset)} prompts, a batch needs "
                f"{config.train_batch_size}"
            )
        self._loader = StatefulDataLoader(
            dataset=dataset,
            batch_size=config.train_batch_size,
            num_workers=config.dataloader_num_workers,
            drop_last=True,
            collate_fn=collate_fn,
            sampler=create_rl_sampler(config, dataset),
        )

    def __iter__(self) -> Iterator[Columns]:
        while True:
            for batch in self._loader:
                yield _columns(batch)

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch starts."""
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken."""
        self._loader.load_state_dict(state)


def read_prompts(
    files: str, config: DictConfig, tokenizer: Any, cache: Path, limit: int
) -> Columns:
    """All prompts of a set that is only evaluated; ``limit`` rows at most, -1 for all."""
    dataset = _load(files, config, tokenizer, cache, limit)
    return _columns(collate_fn([dataset[row] for row in range(len(dataset))]))


def repeat(columns: Columns, uids: Sequence[str], times: int) -> Columns:
    """Each row ``times`` times in a row, with the uid of its prompt as a column."""
    repeated = {
        name: [value for value in values for _ in range(times)] for name, values in columns.items()
    }
    return {**repeated, "uid": [uid for uid in uids for _ in range(times)]}


def _load(files: str, config: DictConfig, tokenizer: Any, cache: Path, limit: int) -> Any:
    # The library takes its cache from the user's home unless told before the first use.
    datasets.config.HF_DATASETS_CACHE = cache
    with redirect_stdout(StringIO()):  # verl prints what it does
        return create_rl_dataset([files], config, tokenizer, None, max_samples=limit)


def _columns(batch: Mapping[str, Any]) -> Columns:
    return {name: list(batch[name]) for name in _COLUMNS}
