"""What a validation reports, named as verl's trainer names it."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from verl import DataProto
from verl.trainer.ppo import metric_utils

_metrics: Any = metric_utils


def validation_metrics(data: DataProto) -> dict[str, float]:
    """``val-core/<source>/<variable>/<metric>``, and ``val-aux/...`` for the less important.

    Args:
        data: ``uid``, ``data_source``, ``token_level_scores`` (B, R) and ``reward_extra_info``;
            ``__num_turns__`` where the answers are conversations.
    """
    rows = data.non_tensor_batch
    variables: dict[str, list[Any]] = {
        "reward": data.batch["token_level_scores"].sum(dim=1).tolist()
    }
    extra: list[Mapping[str, Any]] = list(rows["reward_extra_info"])
    for name in sorted({name for row in extra for name in row}):
        variables[name] = [row.get(name) for row in extra]
    by_source = _metrics.process_validation_metrics(
        list(rows["data_source"]), list(rows["uid"]), variables
    )
    found = {
        f"val-{_section(name, metric, by_variable)}/{source}/{name}/{metric}": float(value)
        for source, by_variable in by_source.items()
        for name, values in by_variable.items()
        for metric, value in values.items()
    }
    if "__num_turns__" in rows:
        turns = [int(number) for number in rows["__num_turns__"]]
        found["val-aux/num_turns/min"] = min(turns)
        found["val-aux/num_turns/max"] = max(turns)
        found["val-aux/num_turns/mean"] = sum(turns) / len(turns)
    return found


def _section(name: str, metric: str, variables: Mapping[str, Mapping[str, float]]) -> str:
    """``core``: of the main variable, over all answers to a prompt."""
    main = "acc" if "acc" in variables else "reward"
    sizes = [int(key.partition("@")[2].partition("/")[0]) for key in variables[name]]
    is_core = (
        name == main and metric.startswith(("mean", "maj", "best")) and f"@{max(sizes)}" in metric
    )
    return "core" if is_core else "aux"


def texts(tokenizer: Any, data: DataProto) -> tuple[list[str], list[str]]:
    """Prompts and answers (B each), without special tokens."""
    prompts, responses = data.batch["prompts"], data.batch["responses"]
    attention = data.batch["attention_mask"].bool()
    width = prompts.shape[1]

    def decode(ids: torch.Tensor, mask: torch.Tensor) -> list[str]:
        rows = [row[kept].tolist() for row, kept in zip(ids, mask, strict=True)]
        return tokenizer.batch_decode(rows, skip_special_tokens=True)

    return decode(prompts, attention[:, :width]), decode(responses, attention[:, width:])


def generations(tokenizer: Any, data: DataProto, count: int) -> list[tuple[str, str, float]]:
    """``count`` answers as (prompt, answer, score): the same prompts each time."""
    scores = data.batch["token_level_scores"].sum(dim=1).tolist()
    found = sorted(zip(*texts(tokenizer, data), scores, strict=True))
    random.Random(42).shuffle(found)
    return found[:count]


def dump(tokenizer: Any, data: DataProto, folder: Path, step: int) -> None:
    """Write ``<folder>/<step>.jsonl``, a line a sample in the order of ``data``, at one stroke."""
    prompts, answers = texts(tokenizer, data)
    scores = data.batch["token_level_scores"].sum(dim=1).tolist()
    rows = data.non_tensor_batch
    lines = [
        {
            "input": prompts[row],
            "output": answers[row],
            "gts": rows["reward_model"][row].get("ground_truth"),
            "score": scores[row],
            "step": step,
            "uid": rows["uid"][row],
            **rows["reward_extra_info"][row],
        }
        for row in range(len(data))
    ]
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{step}.jsonl.tmp"
    text = "".join(f"{json.dumps(line, ensure_ascii=False, default=str)}\n" for line in lines)
    unfinished.write_text(text)
    unfinished.replace(folder / f"{step}.jsonl")
