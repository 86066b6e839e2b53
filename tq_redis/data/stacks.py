"""Lists of values as tensordict's NonTensorStack, and back, without what it costs.

A NonTensorStack holds one NonTensorData for each value, which takes 30 microseconds to make and 10
to read: more than it takes to bring a text of ten thousand characters from another process.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack
from tensordict.utils import LinkedList

# Typed in part.
_stack: Any = NonTensorStack
_linked: Any = LinkedList

_making = threading.Lock()


def stack_of(values: Sequence[Any]) -> NonTensorStack:
    """A NonTensorStack of batch size (B,) with these B values; at least one."""
    return _Unwrapped.of(values)


def values_of(stack: NonTensorData | NonTensorStack) -> list[Any]:
    """The values, one for each row. TensorDict keeps equal ones once; they become many again."""
    values = _kept(stack) if type(stack) is NonTensorStack else None
    return stack.tolist() if values is None else values


def _kept(stack: Any) -> list[Any] | None:
    """The values from where NonTensorData keeps them; None if there may be something else."""
    entries: list[Any] = stack.tensordicts
    if len(stack.batch_size) != 1 or set(map(type, entries)) != {NonTensorData}:
        return None
    try:
        values: list[Any] = [vars(entry)["_non_tensordict"]["data"] for entry in entries]
    except KeyError:
        return None
    kinds: set[type[Any]] = set(map(type, values))
    # Values in memory that processes share are kept as proxies.
    shared = any(kind.__module__.startswith("multiprocessing.") for kind in kinds)
    return None if shared else values


class _Unwrapped(_stack):
    """A stack whose values are still a list: most readers want nothing else.

    When something asks for the entries, they are made, and this object becomes an ordinary
    NonTensorStack.
    """

    @classmethod
    def of(cls, values: Sequence[Any]) -> Any:
        made = _stack(NonTensorData(None))
        del made.tensordicts
        made._batch_size = torch.Size([len(values)])
        made._values = list(values)
        made.__class__ = cls
        return made

    @property
    def tensordicts(self) -> list[Any]:
        with _making:
            if type(self) is _Unwrapped:
                self.tensordicts = [NonTensorData(value) for value in self._values]
        return self.tensordicts

    @tensordicts.setter
    def tensordicts(self, entries: list[Any]) -> None:
        self.__dict__["tensordicts"] = entries
        self.__class__ = NonTensorStack
        self.__dict__.pop("_values", None)

    def tolist(self, *, as_linked_list: bool = False, **options: Any) -> list[Any]:
        values = vars(self).get("_values")
        if values is None:  # another thread has asked for the entries meanwhile
            return self.tolist(as_linked_list=as_linked_list, **options)
        return _linked(values, td=self) if as_linked_list else list(values)

    def _has_names(self) -> bool:
        return False

    def __reduce_ex__(self, protocol: Any) -> Any:
        _ = self.tensordicts
        return self.__reduce_ex__(protocol)
