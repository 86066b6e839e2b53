"""The Ray instance of one training run: started by the trainer, gone when the trainer is."""

from __future__ import annotations

import logging
import os
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf

from recipe.ppo.environment import DEFAULTS

# Ends with the trainer, whatever ends it, because then the pipe closes that it reads. Ray's own
# processes take a moment longer, and may still write.
_SWEEPER = """
read -r _
for second in 1 2 3 4 5 6 7 8 9 10; do
    rm -rf -- "$1" && exit
    sleep 1
done
"""

# The folder that holds the package recipe: it is not installed.
_SOURCE = Path(__file__).parents[2]


@contextmanager
def ray_cluster(config: DictConfig) -> Generator[None]:
    """Run Ray with the settings of ``ray_kwargs.ray_init`` for the length of the block, or join the
    cluster whose ``address`` they name."""
    settings: Any = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
    runtime = settings.pop("runtime_env", None) or {}
    inherited = (*DEFAULTS, "MPLCONFIGDIR")
    variables = {name: os.environ[name] for name in inherited if name in os.environ}
    paths = [str(_SOURCE), os.environ.get("PYTHONPATH")]
    variables["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    with _passing_folder() as folder:
        # verl keeps lock files of checkpoints in the folder for temporary files, for good.
        variables["TMPDIR"] = str(folder)
        try:
            # A cluster of several nodes is there already: +ray_kwargs.ray_init.address=auto
            if "address" not in settings:
                settings |= {"address": "local", "_temp_dir": str(folder)}
            ray.init(
                logging_level=logging.WARNING,
                runtime_env={
                    **{key: value for key, value in runtime.items() if value is not None},
                    "env_vars": {**variables, **runtime.get("env_vars", {})},
                },
                **settings,
            )
            yield
        finally:
            ray.shutdown()


@contextmanager
def _passing_folder() -> Generator[Path]:
    """A folder for Ray's sockets and logs that goes when this process does, killed or not.

    Not in the output folder: a socket's path may have 107 bytes, and Ray uses 63 of them.
    """
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    sweeper = subprocess.Popen(
        ["/bin/sh", "-c", _SWEEPER, "sh", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield folder
    finally:
        sweeper.communicate()
