"""Non-tensor values as msgpack and back, with their exact types.

What msgpack has no type for (or would give back as another type) travels as an extension.
Tensors and arrays travel as raw bytes; large ones beside the msgpack text, so that they are
copied once. Pickle is used only for types that nothing here knows, and only when allowed.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from math import prod
from typing import Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from tq_redis.data.nested import jagged_of_rows, ragged_dim, strided_of_rows
from tq_redis.data.tensors import Bytes, dtype_name, to_bytes, to_tensor, why_not_storable

_LARGE = 64 << 10
_Array = npt.NDArray[Any]


class _Kind(IntEnum):
    """Extension codes; part of the stored format."""

    TUPLE = 1
    MAP = 2
    SET = 3
    FROZENSET = 4
    BIG_INT = 5
    COMPLEX = 6
    BYTEARRAY = 7
    ARRAY = 8
    SCALAR = 9
    OBJECTS = 10
    TENSOR = 11
    NESTED = 12
    PICKLE = 13


class UnsupportedValueError(TypeError):
    """A value that cannot be stored. The caller knows the field and row."""


class ValueEncoder:
    """Turns values into msgpack bytes; large buffers are collected in ``large``."""

    def __init__(self, *, allow_pickle: bool) -> None:
        self.large: list[Bytes] = []
        self._allow_pickle = allow_pickle
        self._msgpack = msgspec.msgpack.Encoder()
        self._row_start = 0
        self._writers: dict[type[Any], Callable[[Any], Any]] = {
            int: self._int,
            list: lambda value: [self._wrap(item) for item in value],
            dict: self._mapping,
            tuple: lambda value: self._items(_Kind.TUPLE, value),
            set: lambda value: self._items(_Kind.SET, value),
            frozenset: lambda value: self._items(_Kind.FROZENSET, value),
            complex: lambda value: self._ext(_Kind.COMPLEX, [value.real, value.imag]),
            bytearray: lambda value: msgspec.msgpack.Ext(_Kind.BYTEARRAY.value, value),
            np.ndarray: self._array,
        }

    def append(self, value: Any, text: bytearray) -> None:
        """Append one row's value to ``text`` (and its large buffers to ``large``).

        Raises:
            UnsupportedValueError: the value, or one inside it, cannot be stored.
        """
        self._row_start = len(self.large)
        try:
            self._msgpack.encode_into(self._wrap(value), text, -1)
        except RecursionError:
            raise UnsupportedValueError("the value is nested too deeply") from None
        except UnicodeEncodeError as error:
            raise UnsupportedValueError(f"the text is not valid Unicode ({error})") from None

    def _wrap(self, value: Any) -> Any:
        kind = cast(type[Any], type(value))
        if kind in _PLAIN:
            return value
        if kind in self._writers:
            return self._writers[kind](value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if issubclass(kind, np.generic) and _survives(value.dtype):
            return self._ext(_Kind.SCALAR, [value.dtype.str, value.tobytes()])
        return self._pickled(value)

    def _ext(self, kind: _Kind, content: Any) -> msgspec.msgpack.Ext:
        return msgspec.msgpack.Ext(kind.value, self._msgpack.encode(content))

    def _items(self, kind: _Kind, value: Iterable[Any]) -> msgspec.msgpack.Ext:
        return self._ext(kind, [self._wrap(item) for item in value])

    def _int(self, value: int) -> int | msgspec.msgpack.Ext:
        if -(1 << 63) <= value < 1 << 64:
            return value
        size = value.bit_length() // 8 + 1
        return msgspec.msgpack.Ext(_Kind.BIG_INT.value, value.to_bytes(size, "little", signed=True))

    def _mapping(self, value: dict[Any, Any]) -> Any:
        if all(type(key) is str for key in value):
            return {key: self._wrap(item) for key, item in value.items()}
        pairs = [[self._wrap(key), self._wrap(item)] for key, item in value.items()]
        return self._ext(_Kind.MAP, pairs)

    def _raw(self, data: Bytes) -> bytes | int:
        """Bytes to inline, or the position of a large buffer among those of this row."""
        if data.nbytes < _LARGE:
            return data.tobytes()
        self.large.append(data)
        return len(self.large) - 1 - self._row_start

    def _tensor(self, value: torch.Tensor) -> msgspec.msgpack.Ext:
        reason = why_not_storable(value)
        if reason is not None:
            raise UnsupportedValueError(reason)
        if value.is_nested:
            rows = [self._tensor(row) for row in value.unbind()]
            ragged = ragged_dim(value) if value.layout == torch.jagged else 0
            return self._ext(_Kind.NESTED, [ragged, rows])
        content = [dtype_name(value.dtype), list(value.shape), self._raw(to_bytes(value))]
        return self._ext(_Kind.TENSOR, content)

    def _array(self, value: _Array) -> msgspec.msgpack.Ext:
        if value.dtype.hasobject and value.dtype == np.dtype(object):
            items = [self._wrap(item) for item in value.reshape(-1).tolist()]
            return self._ext(_Kind.OBJECTS, [list(value.shape), items])
        if not _survives(value.dtype):
            return self._pickled(value)
        plain = np.ascontiguousarray(value).reshape(-1)
        data = self._raw(plain.view(np.uint8)) if value.nbytes >= _LARGE else plain.tobytes()
        return self._ext(_Kind.ARRAY, [value.dtype.str, list(value.shape), data])

    def _pickled(self, value: Any) -> msgspec.msgpack.Ext:
        if not self._allow_pickle:
            kind = cast(type[Any], type(value))
            raise UnsupportedValueError(
                f"a value of type {kind.__module__}.{kind.__qualname__} is not supported; "
                "convert it to plain values, or set data.pickle"
            )
        return msgspec.msgpack.Ext(_Kind.PICKLE.value, pickle.dumps(value, protocol=5))


_PLAIN: frozenset[type[Any]] = frozenset({type(None), bool, float, str, bytes})


def _survives(dtype: np.dtype[Any]) -> bool:
    """Whether the text form of this dtype gives the same dtype back."""
    return not dtype.hasobject and np.dtype(dtype.str) == dtype


class ValueDecoder:
    """Turns msgpack bytes back into values; all of them own their memory."""

    def __init__(self, *, allow_pickle: bool) -> None:
        self._allow_pickle = allow_pickle
        self._msgpack = msgspec.msgpack.Decoder(ext_hook=self._ext)
        self._large: Sequence[Bytes] = ()
        self._readers: dict[int, Callable[[Any], Any]] = {
            _Kind.TUPLE: tuple,
            _Kind.MAP: dict,
            _Kind.SET: set,
            _Kind.FROZENSET: frozenset,
            _Kind.COMPLEX: lambda parts: complex(*parts),
            _Kind.ARRAY: self._array,
            _Kind.SCALAR: self._scalar,
            _Kind.OBJECTS: _objects,
            _Kind.TENSOR: self._tensor,
            _Kind.NESTED: _nested,
        }

    def value(self, text: memoryview, large: Sequence[Bytes]) -> Any:
        """One row's value from its msgpack bytes and its large buffers."""
        self._large = large
        return self._msgpack.decode(text)

    def _ext(self, kind: int, payload: memoryview) -> Any:
        if kind == _Kind.BIG_INT:
            return int.from_bytes(payload, "little", signed=True)
        if kind == _Kind.BYTEARRAY:
            return bytearray(payload)
        if kind == _Kind.PICKLE:
            return self._unpickle(payload)
        return self._readers[kind](self._msgpack.decode(payload))

    def _unpickle(self, payload: memoryview) -> Any:
        if not self._allow_pickle:
            raise UnsupportedValueError("the value was pickled; set data.pickle to read it")
        return pickle.loads(payload)  # noqa: S301  (the user set data.pickle)

    def _raw(self, data: bytes | int) -> Bytes:
        return self._large[data] if isinstance(data, int) else np.frombuffer(data, np.uint8)

    def _tensor(self, content: tuple[str, list[int], bytes | int]) -> torch.Tensor:
        dtype, shape, data = content
        return to_tensor(self._raw(data).copy(), dtype, tuple(shape))

    def _array(self, content: tuple[str, list[int], bytes | int]) -> _Array:
        dtype, shape, data = content
        return np.ndarray(shape, dtype, buffer=self._raw(data).copy())

    def _scalar(self, content: tuple[str, bytes]) -> Any:
        dtype, data = content
        return np.ndarray((), dtype, buffer=data)[()]


def _objects(content: tuple[list[int], list[Any]]) -> _Array:
    shape, items = content
    array = np.empty(prod(shape), dtype=object)
    for position, item in enumerate(items):  # assigning the list would look inside its items
        array[position] = item
    return array.reshape(shape)


def _nested(content: tuple[int, list[torch.Tensor]]) -> torch.Tensor:
    ragged, rows = content
    return jagged_of_rows(rows, ragged) if ragged else strided_of_rows(rows)
