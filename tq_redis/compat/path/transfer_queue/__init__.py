"""What ``import transfer_queue`` finds where the folder of this package is on PYTHONPATH."""

import importlib
import sys

from tq_redis.compat import install

install()
# The import system hands out what stands here when this file has run.
sys.modules[__name__] = importlib.import_module("tq_redis.compat.transfer_queue")
