"""The Ray instance of one training run: started by the trainer, gone when the trainer is."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import ray
from omegaconf import DictConfig, OmegaConf

# Ray makes sockets below its folder, and a socket's path may have 107 bytes. This much of it is
# Ray's own: /session_<date>_<time>_<microseconds>_<pid>/sockets/plasma_store
_RAY_PATH = 70
_SOCKET_PATH = 107
_WHERE = "ray_folder"

# The folder that holds the package recipe: it is not installed.
_SOURCE = Path(__file__).parents[2]

# Workers import verl by themselves, so they need what prepare_environment() set.
_INHERITED = ("VERL_USE_EXTERNAL_MODULES", "TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE")


def prepare_environment() -> None:
    """Set what verl, Ray and transformers read when they are imported; call this first."""
    defaults = {
        "VERL_USE_EXTERNAL_MODULES": "recipe.cpu",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        # No token file in the home folder: this Ray listens for this machine only.
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


@contextmanager
def ray_cluster(config: DictConfig, output: Path) -> Generator[None]:
    """Run Ray with the settings of ``ray_kwargs.ray_init`` for the length of the block."""
    folder = _ray_folder(output)
    settings = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
    assert isinstance(settings, dict)
    runtime = settings.pop("runtime_env", None) or {}
    variables = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    paths = [str(_SOURCE), os.environ.get("PYTHONPATH")]
    # verl keeps lock files of checkpoints in the folder for temporary files, for good.
    variables["TMPDIR"] = str(folder)
    variables["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    try:
        ray.init(
            address="local",
            _temp_dir=str(folder),
            runtime_env={
                **{key: value for key, value in runtime.items() if value is not None},
                "env_vars": {**variables, **runtime.get("env_vars", {})},
            },
            **{str(key): value for key, value in settings.items()},
        )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _ray_folder(output: Path) -> Path:
    """An empty folder for Ray's sockets and logs, in ``output`` where the path is short enough.

    Otherwise in the folder for temporary files, with a note in ``output``, so that the next run
    removes what a killed one left there.
    """
    note = output / _WHERE
    if note.exists():
        shutil.rmtree(note.read_text(), ignore_errors=True)
        note.unlink()
    inside = output / "ray"
    if len(os.fsencode(inside)) + _RAY_PATH <= _SOCKET_PATH:
        shutil.rmtree(inside, ignore_errors=True)
        inside.mkdir(parents=True)
        return inside
    outside = tempfile.mkdtemp(prefix="ray-")
    note.write_text(outside)
    return Path(outside)
