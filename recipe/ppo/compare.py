"""Train with the queue and without it, from the same weights and seeds, and compare every number.

``python -m recipe.ppo.compare [--write docs/equivalence.md] [--rounds N] [name=value ...]``
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from omegaconf import DictConfig

from recipe.ppo.environment import prepare_environment

if TYPE_CHECKING:
    from recipe.ppo.difference import Pair
    from recipe.ppo.planes import Plane
    from recipe.ppo.workers import Workers

ALGORITHMS = ("grpo", "gae")

_TASK = Path("outputs") / "compare"
_CONFIG = Path(__file__).parent / "config"


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--output", type=click.Path(path_type=Path), default=_TASK)
@click.option("--write", type=click.Path(path_type=Path), help="Put the result into this page.")
@click.option("--algorithm", "algorithms", multiple=True, default=ALGORITHMS)
@click.option("--rounds", default=1, help="Trainings of each kind, in turn; for the step times.")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
def main(
    output: Path,
    write: Path | None,
    algorithms: tuple[str, ...],
    rounds: int,
    overrides: tuple[str, ...],
) -> None:
    """Print what differs; status 1 if anything does by more than rounding."""
    prepare_environment()
    from recipe.ppo.cluster import ray_cluster
    from recipe.ppo.difference import report
    from recipe.ppo.main_ppo import prepare
    from recipe.ppo.planes import open_plane
    from recipe.ppo.workers import start_workers
    from recipe.v1.difference import replaced

    configs = {
        name: composed(output.resolve() / name, [f"algorithm.adv_estimator={name}", *overrides])
        for name in algorithms
    }
    for config in configs.values():
        prepare(config)
    first = next(iter(configs.values()))
    pairs: list[Pair] = []
    with ray_cluster(first), open_plane(first.tq_redis) as queue:
        for name, config in configs.items():
            workers = start_workers(config)
            pairs.append(both(name, config, workers, queue, rounds))
            workers.end()
    text, equal = report(pairs)
    print(text)
    if write is not None:
        page = replaced(write.read_text(encoding="utf-8"), text, "recipe.ppo.compare")
        write.write_text(page, encoding="utf-8")
    sys.exit(0 if equal else 1)


def both(name: str, config: DictConfig, workers: Workers, queue: Plane, rounds: int = 1) -> Pair:
    """Both trainings of one configuration, on the same workers and from the same weights.

    Args:
        name: of the pair, in the report.
        config: the whole configuration, resolved.
        workers: started with it.
        queue: the plane that is compared with the plain one.
        rounds: trainings of each kind; which kind comes first changes from one to the next.
    """
    from recipe.ppo.difference import PLAIN, QUEUE, Pair
    from recipe.ppo.planes import PlainPlane

    root = Path(config.output_dir)
    pair = Pair(name)
    beginning = _train(config, root / "start", workers, PlainPlane(), None)
    for number in range(rounds):
        turns = [(PLAIN, PlainPlane()), (QUEUE, queue)]
        for kind, plane in turns if number % 2 == 0 else reversed(turns):
            traced = TracedPlane(plane)
            folder = _train(config, root / f"{kind}_{number}", workers, traced, beginning)
            pair.add(kind, folder, traced.steps)
    return pair


def _train(
    config: DictConfig, output: Path, workers: Workers, plane: Any, start: Path | None
) -> Path:
    """Train from a checkpoint; without one, only save the weights that training starts from.

    Returns:
        The folder of the last checkpoint.
    """
    from recipe.ppo.ray_trainer import RayPPOTrainer
    from recipe.ppo.reports import Reports

    own = copy.deepcopy(config)
    own.output_dir, own.trainer.default_local_dir = str(output), str(output / "checkpoints")
    own.trainer.resume_mode, own.trainer.resume_from_path = "resume_path", str(start)
    own.trainer.save_freq = own.trainer.total_training_steps  # the last step only
    output.mkdir(parents=True, exist_ok=True)
    trainer = RayPPOTrainer(own, plane, workers, Reports(own))
    if start is None:
        trainer.save()
    else:
        trainer.fit()
    latest = trainer.checkpoints.latest
    assert latest is not None
    return trainer.checkpoints.folder(latest)


class TracedPlane:
    """A plane that counts what passes through the driver.

    Attributes:
        steps: name of a step -> bytes of tensors, and bytes of all that was passed, pickled.
    """

    def __init__(self, plane: Any) -> None:
        self._plane = plane
        self.steps: dict[str, tuple[int, int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plane, name)

    def step(self, name: str, **settings: Any) -> Any:
        """The plane's step, watched."""
        step = self._plane.step(name, **settings)
        plane_batch, plane_take = step._batch, step._take

        def count(value: Any) -> None:
            tensors, others = self.steps.get(name, (0, 0))
            buffers: list[Any] = []
            rest = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
            self.steps[name] = (
                tensors + tensor_bytes(value),
                others + len(rest) + sum(buffer.raw().nbytes for buffer in buffers),
            )

        @contextmanager
        def batch(task: str, method: Any, info: Mapping[str, Any]) -> Generator[Any]:
            given: AbstractContextManager[Any] = plane_batch(task, method, info)
            with given as value:
                count(value)
                yield value

        def take(method: Any, value: Any, output: Any) -> Mapping[str, Any]:
            count(output)
            return plane_take(method, value, output)

        step._batch, step._take = batch, take
        return step


def tensor_bytes(value: Any) -> int:
    """Bytes of the tensors in a DataProto; 0 for metadata, which has none."""
    columns = getattr(value, "batch", None)
    return 0 if columns is None else sum(c.numel() * c.element_size() for c in columns.values())


def composed(output: Path, overrides: Sequence[str]) -> DictConfig:
    """The configuration of a training on the task, resolved; ``overrides`` are Hydra's."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    settings = [
        *("trainer.total_training_steps=20", "trainer.test_freq=10", f"output_dir={output}"),
        # Trained words and weights are compared, and not how well they do on all words.
        *("data.val_max_samples=64", "data.test_max_samples=64"),
        f"tq_redis.redis.namespace={output.name}",
        *overrides,
    ]
    with initialize_config_dir(str(_CONFIG), version_base=None):
        config = compose("ppo", overrides=settings)
    OmegaConf.resolve(config)
    return config


if __name__ == "__main__":
    main()
