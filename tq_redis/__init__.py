"""tq_redis: a sample queue for reinforcement-learning post-training.

Who has what and who may take it is state in Redis; tensors stay in Ray's object store; a trainer
passes a small :class:`BatchMeta` around.

Names are imported when they are first used: torch takes seconds, and not everybody needs it.
``__init__.pyi`` lists them.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)  # pyright: ignore[reportUnknownVariableType]
