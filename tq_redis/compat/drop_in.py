"""``import transfer_queue`` finds :mod:`tq_redis.compat.transfer_queue`: in this process, in those
that it starts, and in the workers of its Ray job.

Three ways lead there, so that nobody has to be told:

- a finder in front of all others, in this process;
- a folder with a package of that name in front of ``PYTHONPATH``, for processes that inherit it;
- Ray's hook for workers, on every node that has tq_redis. Ray asks for it by way of
  ``RAY_RUNTIME_ENV_HOOK`` when the process calls ``ray.init``.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from tq_redis.config import variables_that_are_set
from tq_redis.errors import ConfigError

_log = logging.getLogger(__name__)

_NAME = "transfer_queue"
_PLACE = "tq_redis.compat"
_FOLDER = str(Path(__file__).parent / "path")
_RAY_HOOK = "RAY_RUNTIME_ENV_HOOK"
_WORKER_HOOK = "worker_process_setup_hook"


def install() -> None:
    """Put the drop-in in the place of ``transfer_queue``, whether that is installed or not.

    Call it before anything imports ``transfer_queue``, and before ``ray.init``. Can be repeated.

    Raises:
        ConfigError: another ``transfer_queue`` is imported already: modules may hold names of it,
            which would not fit those of the drop-in.
    """
    there = sys.modules.get(_NAME)
    origin = getattr(there, "__file__", None) or ""
    if there is not None and not origin.startswith(str(Path(__file__).parent)):
        raise ConfigError(
            f"{_NAME} is imported already, from {origin or 'an unknown place'}, and modules may "
            f"hold names of it. Call tq_redis.compat.install() before anything imports it."
        )
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _put_first_on_path()
    hook = f"{__name__}.{ray_runtime_env.__name__}"
    if os.environ.setdefault(_RAY_HOOK, hook) != hook:
        _log.warning(
            "%s is set to %s, so that Ray workers find the drop-in only by PYTHONPATH, which has "
            "to hold %s on every node",
            _RAY_HOOK,
            os.environ[_RAY_HOOK],
            _FOLDER,
        )


def ray_runtime_env(runtime_env: Mapping[str, Any] | None) -> dict[str, Any]:
    """What ``ray.init`` is given, and that each worker calls :func:`install`. A job that has a
    hook of its own for workers keeps it, and gets ``PYTHONPATH`` instead.

    Workers also learn which Redis this process would use: those of a cluster that runs already do
    not inherit its environment."""
    env = dict(runtime_env or {})
    if found := variables_that_are_set():
        env["env_vars"] = found | dict(env.get("env_vars") or {})
    install_it = f"{__name__}.{install.__name__}"
    if env.setdefault(_WORKER_HOOK, install_it) != install_it:
        variables = dict(env.get("env_vars") or {})
        # Ray puts in what the worker's node has.
        others = variables.get("PYTHONPATH", "${PYTHONPATH}")
        env["env_vars"] = variables | {"PYTHONPATH": f"{_FOLDER}{os.pathsep}{others}"}
    return env


class _Finder(MetaPathFinder, Loader):
    """Gives the drop-in's modules under the other name: the same objects, imported when asked
    for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != _NAME:
            return None
        found = importlib.util.find_spec(f"{_PLACE}.{fullname}")
        if found is None:
            return None
        return ModuleSpec(fullname, self, is_package=found.submodule_search_locations is not None)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(f"{_PLACE}.{spec.name}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # It was executed under its own name. The import system has given it the other spec.
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def _put_first_on_path() -> None:
    others = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    parts = [_FOLDER, *(part for part in others if part != _FOLDER)]
    os.environ["PYTHONPATH"] = os.pathsep.join(parts)
