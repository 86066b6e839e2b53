"""Run a program with the drop-in in the place of transfer_queue.

::

python -m tq_redis.compat train.py --steps 10
python -m tq_redis.compat -m verl.trainer.main_ppo trainer.nnodes=1
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from tq_redis.compat import install


def main() -> None:
    """Run what the arguments name."""
    arguments = sys.argv[1:]
    if not arguments or arguments == ["-m"]:
        sys.exit(__doc__)
    install()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
