"""Columns of every kind, five rows each, for the tests of the codec and of the backends."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

ROWS = 5
LENGTHS = [3, 1, 0, 5, 2]

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
]


def random(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random bits; any pattern is a value of any dtype but bool."""
    top = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, top, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def strided(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.nested_tensor(rows, layout=torch.strided)


def jagged_in_dim_2(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(5, 3, ragged)."""
    values = random((3, sum(LENGTHS)), dtype)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=2)


def narrowed() -> torch.Tensor:
    """A jagged view of a dense tensor with gaps between the samples."""
    starts, lengths = torch.tensor([0, 1, 2, 0, 4]), torch.tensor([2, 3, 1, 0, 2])
    return torch.nested.narrow(random((ROWS, 6)), 1, starts, lengths, layout=torch.jagged)


def tensor_columns() -> dict[str, torch.Tensor]:
    """Dense and nested columns, whose memory is laid out in every way that torch knows."""
    return {
        "scalars": random((ROWS,)),
        "one_wide": random((ROWS, 1)),
        "matrix": random((ROWS, 3, 2)),
        "wide": random((ROWS, 700)),
        "no_elements": random((ROWS, 0)),
        "no_elements_inside": random((ROWS, 0, 5)),
        "transposed": random((3, ROWS)).t(),
        "strided_rows": random((2 * ROWS, 3))[::2],
        "strided_scalars": random((2 * ROWS,))[::2],
        "expanded": random((1, 3)).expand(ROWS, 3),
        "offset": random((ROWS + 2, 3))[2:],
        "with_grad": random((ROWS, 3)).requires_grad_(),
        "parameter": torch.nn.Parameter(random((ROWS, 3))),
        "conjugated": random((ROWS, 3), torch.complex64).conj(),
        "negated": random((ROWS, 3), torch.complex64).conj().imag,
        "jagged": jagged([random((n,)) for n in LENGTHS]),
        "jagged_wide": jagged([random((n, 4), torch.bfloat16) for n in LENGTHS]),
        "jagged_long": jagged([random((700 * n,)) for n in LENGTHS]),
        "jagged_equal": jagged([random((2,)) for _ in LENGTHS]),
        "jagged_with_grad": jagged([random((n,)) for n in LENGTHS]).requires_grad_(),
        "jagged_transposed": jagged([random((n, 4)) for n in LENGTHS]).transpose(1, 2),
        "jagged_in_dim_2": jagged_in_dim_2(),
        "narrowed": narrowed(),
        "strided": strided([random((2, n)) for n in LENGTHS]),
        "strided_two_ragged": strided([random((n, 6 - n)) for n in LENGTHS]),
        "strided_scalar_rows": strided([random(()) for _ in LENGTHS]),
    }


def objects(values: list[Any]) -> np.ndarray[Any, Any]:
    array = np.empty(len(values), dtype=object)
    for position, value in enumerate(values):
        array[position] = value
    return array


def value_columns() -> dict[str, list[Any]]:
    """Columns of values that are not tensors."""
    return {
        "text": ["", "a", "汉字", "a\x00b", "a"],
        "nones": [None] * ROWS,
        "mixed": [None, "", float("nan"), {"k": [1]}, b"\x00"],
        "numbers": [0, 1, True, 1.0, False],
        "big_numbers": [2**63, -(2**63), 2**64, -(2**200), 2**64 - 1],
        "floats": [0.0, -0.0, float("inf"), 1e-310, float("nan")],
        "equal_dicts": [{"a": 1}] * ROWS,
        "containers": [(), (1, (2,)), {1, 2}, frozenset({"a"}), bytearray(b"xy")],
        "complex": [1j, complex("nan"), 0j, -1 + 2j, 1 + 0j],
        "keys": [{1: 2}, {(1, 2): 3}, {None: 4}, {b"k": 5}, {"s": 6, 7: 8}],
        "numpy_scalars": [np.float64("nan"), np.int8(3), np.bool_(True), np.str_("x"), np.str_("")],
        "dates": [np.datetime64("2026-01-01"), np.timedelta64(3, "s"), *[np.float16(1)] * 3],
        "arrays": [
            np.arange(3),
            np.zeros((0, 2), np.float32),
            np.array("scalar"),
            np.ones((2, 2), ">f4").T,
            np.array(["a", "bc"]),
        ],
        "large_array": [np.arange(20_000.0), np.asfortranarray(np.ones((300, 100))), 1, 2, 3],
        "object_arrays": [
            objects(["a", None]),
            objects([objects(["b"]), [1]]),
            objects([{"k": torch.ones(2)}]),
            objects([]),
            np.array([["a", 1], [None, 2.0]], dtype=object),
        ],
        "tensors": [random((2,)), random(()), random((0, 3)), random((2, 2), torch.bfloat16), None],
        "nested_inside": [
            jagged([random((2,)), random((3,))]),
            strided([random((2, 3)), random((2, 5))]),
            jagged_in_dim_2(),
            narrowed(),
            [torch.ones(2)],
        ],
        "images": [
            {
                "pixel_values": random((1, 3, 40, 40), torch.bfloat16),
                "grid": torch.tensor([[1, 2, 3]]),
                "name": "x.png",
                "opt": None,
            }
            for _ in range(ROWS)
        ],
    }
