"""What a run needs before it starts: the words, and a model that gets some of them right."""

from __future__ import annotations

from pathlib import Path

from recipe.tasks.spell_backward import make_splits, write_parquet
from recipe.tasks.warm_start import WarmStartSettings, warm_start


def prepare(folder: Path, settings: WarmStartSettings | None = None) -> None:
    """Write ``train.parquet``, ``tuning.parquet`` and ``model``; what exists stays.

    Args:
        folder: gets them.
        settings: of the warm start.
    """
    model = folder / "model"
    if model.exists():
        return
    splits = make_splits()
    write_parquet(splits.train, "train", folder / "train.parquet")
    write_parquet(splits.tuning, "tuning", folder / "tuning.parquet")
    model.symlink_to(warm_start(settings or WarmStartSettings(), splits, folder).name)
