"""What every backend promises; each test runs on all of them."""

from __future__ import annotations

import asyncio
import uuid
import warnings
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import pytest
import torch

from tests.data.columns import ROWS, jagged, random, tensor_columns, value_columns
from tests.data.runs import all_rows, handles
from tests.data.same import assert_same, rows_of
from tests.data.units import Units, open_plane, running_units
from tq_redis.client.portal import Portal
from tq_redis.config import Config, DataConfig, RedisConfig
from tq_redis.data import Column, DataPlane, Run, WrittenBlock, ray_store, zmq_store
from tq_redis.deadline import Deadline
from tq_redis.errors import DataLostError, InputError

T = TypeVar("T")
BLOCK_BYTES = 128 << 10


def run(call: Coroutine[Any, Any, T]) -> T:
    """On the one event loop that all calls of this file share."""
    return _portal.run(call)


_portal = Portal()


@pytest.fixture(scope="module", autouse=True)
def _end_portal() -> Iterator[None]:
    yield
    _portal.stop()


def soon() -> Deadline:
    return Deadline(30)


@dataclass(frozen=True)
class Case:
    """Backends to test: what each field goes to, and how small is small."""

    data: DataConfig
    units: int = 0
    small_bytes: int | None = None


CASES = {
    "memory": Case(DataConfig(backend="memory")),
    "ray": Case(DataConfig(backend="ray")),
    "ray, no block is small": Case(DataConfig(backend="ray"), small_bytes=0),
    "zmq": Case(DataConfig(backend="zmq"), units=2),
    "zmq, no block is small": Case(DataConfig(backend="zmq"), units=1, small_bytes=0),
    "zmq, encrypted": Case(DataConfig(backend="zmq", curve=True), units=1),
    "three backends": Case(
        DataConfig(backend="memory", routes={"x": "zmq", "*a*": "ray"}), units=2
    ),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    case = CASES[request.param]
    with pytest.MonkeyPatch.context() as patch:
        if "ray" in case.data.backends:
            request.getfixturevalue("ray_session")
        if case.small_bytes is not None:
            patch.setattr(ray_store, "DOOR_BYTES", case.small_bytes)
            patch.setattr(ray_store, "SMALL_BYTES", case.small_bytes)
            patch.setattr(zmq_store, "SMALL_BYTES", case.small_bytes)
        yield case


@pytest.fixture(scope="module")
def config(case: Case) -> Config:
    return Config(
        redis=RedisConfig(namespace=f"test-{uuid.uuid4().hex[:12]}"),
        data=msgspec.structs.replace(case.data, block_bytes=BLOCK_BYTES),
    )


@pytest.fixture(scope="module")
def units(case: Case) -> Iterator[Units]:
    with running_units(case.units, curve=case.data.curve) as units:
        yield units


@pytest.fixture(scope="module")
def plane(config: Config, units: Units) -> Iterator[DataPlane]:
    plane = open_plane(config, units)
    run(plane.start(soon()))
    yield plane
    run(plane.shutdown(soon()))
    run(plane.close())


@pytest.fixture
def partition() -> str:
    return uuid.uuid4().hex


def put(
    plane: DataPlane, columns: Mapping[str, Column], partition: str = "p"
) -> list[WrittenBlock]:
    return run(plane.put(partition, columns, soon()))


def get(
    plane: DataPlane, wanted: Mapping[str, list[Run]], *, copy: bool = True
) -> dict[str, Column]:
    return run(plane.get(wanted, soon(), copy=copy))


@pytest.mark.parametrize("copy", [True, False])
def test_columns_of_every_kind_in_one_put(plane: DataPlane, copy: bool) -> None:
    columns: dict[str, Column] = {**tensor_columns(), **value_columns()}
    columns.pop("large_array")  # keeps the put in one block
    columns.pop("images")
    blocks = put(plane, columns)
    assert len(blocks) == len({plane.route(field) for field in columns})
    assert all((block.first_row, block.rows) == (0, ROWS) for block in blocks)
    handle_of = {field: block.handle for block in blocks for field in block.fields}
    assert set(handle_of) == set(columns)
    order = [4, 0, 1, 1]
    whole = get(plane, all_rows(blocks), copy=copy)
    some = get(plane, {f: [(handle_of[f], row, 1) for row in order] for f in columns}, copy=copy)
    assert list(whole) == list(all_rows(blocks))
    for field, column in columns.items():
        expected = column.detach() if isinstance(column, torch.Tensor) else column
        assert_same(whole[field], expected)
        assert_same(some[field], rows_of(column, order))


def test_rows_of_three_puts_in_any_order(plane: DataPlane) -> None:
    columns: dict[str, Any] = {
        "rewards": torch.arange(8.0),
        "lengths": torch.arange(8),
        "flag": torch.arange(8) % 2 == 0,
        "one": torch.arange(8.0).view(8, 1),
        "x": random((8, 5)),
        "ids": jagged([torch.arange(n) for n in (3, 1, 4, 1, 5, 9, 2, 6)]),
        "uid": [f"u{row}" for row in range(8)],
    }
    parts = [(0, 3), (3, 4), (4, 8)]
    where: dict[str, list[tuple[str, int]]] = {field: [] for field in columns}
    for first, last in parts:
        order = list(range(first, last))
        for block in put(plane, {field: rows_of(c, order) for field, c in columns.items()}):
            for field in block.fields:
                where[field] += [(block.handle, row) for row in range(last - first)]
    order = [7, 0, 3]
    got = get(plane, {field: [(*where[field][row], 1) for row in order] for field in columns})
    for field, column in columns.items():
        assert_same(got[field], rows_of(column, order))


def test_a_large_put_is_split_by_field_and_by_rows(plane: DataPlane) -> None:
    columns: dict[str, Column] = {"a": random((64, 2000)), "b": random((64, 2000)), "c": ["x"] * 64}
    blocks = put(plane, columns)
    assert all(len(block.fields) == 1 for block in blocks)
    assert all(block.nbytes <= 1.1 * BLOCK_BYTES for block in blocks)
    assert len({block.handle for block in blocks}) == len(blocks) > 7
    for field, runs in all_rows(blocks).items():
        assert_same(get(plane, {field: runs})[field], columns[field])


def test_tensors_inside_values_are_cut_out_of_the_text(plane: DataPlane) -> None:
    column = [
        {"pixel_values": random((1, 3, 112, 112), torch.bfloat16), "name": str(row), "opt": None}
        for row in range(8)
    ]
    blocks = put(plane, {"images": column})
    assert len(blocks) > 1
    assert_same(get(plane, all_rows(blocks))["images"], column)


def test_what_was_put_is_private(plane: DataPlane) -> None:
    column, value = random((4, 3)), [{"k": torch.ones(2)}] * 4
    expected = column.clone()
    blocks = put(plane, {"x": column, "v": value})
    column.zero_()
    value[0]["k"].zero_()
    got: Any = get(plane, all_rows(blocks))
    assert_same(got["x"], expected)
    got["x"].add_(1)
    got["v"][0]["k"].add_(1)
    again: Any = get(plane, all_rows(blocks))
    assert_same(again["x"], expected)
    assert_same(again["v"][0]["k"], torch.ones(2))


def test_views_need_no_copy_and_do_not_warn(plane: DataPlane, case: Case) -> None:
    column = random((8, 3000))
    (block,) = put(plane, {"x": column})
    wanted = {"x": [(block.handle, 0, 4), (block.handle, 4, 4)]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one: Any = get(plane, wanted, copy=False)["x"]
        two: Any = get(plane, wanted, copy=False)["x"]
    assert_same(one, column)
    backend = plane.route("x")
    if backend == "memory" or (backend == "ray" and case.small_bytes == 0):
        # What comes in messages is shared with no other process.
        assert one.data_ptr() == two.data_ptr()
    assert get(plane, wanted)["x"].data_ptr() != one.data_ptr()  # type: ignore[union-attr]


def test_a_view_stays_valid_after_delete(plane: DataPlane) -> None:
    column = random((64, 400))
    blocks = put(plane, {"x": column})
    view = get(plane, all_rows(blocks), copy=False)["x"]
    run(plane.delete(handles(blocks), soon()))
    for _ in range(8):  # would reuse the memory, had it been freed
        run(plane.delete(handles(put(plane, {"x": torch.zeros_like(column)})), soon()))
    assert_same(view, column)


def test_missing_blocks_are_named_and_the_others_readable(plane: DataPlane) -> None:
    kept, gone = (put(plane, {"x": random((2, 2))})[0].handle for _ in range(2))
    run(plane.delete([gone], soon()))
    with pytest.raises(DataLostError) as raised:
        get(plane, {"x": [(gone, 0, 1), (kept, 0, 1), (gone, 1, 1)]})
    assert raised.value.handles == (gone,)
    get(plane, {"x": [(kept, 0, 2)]})


def test_delete_is_idempotent_and_ignores_the_unknown(plane: DataPlane) -> None:
    (one,) = put(plane, {"x": random((2, 2))})
    (two,) = put(plane, {"x": random((2, 2))})
    unknown = one.handle[:-4] + "zzzz"
    for _ in range(2):
        run(plane.delete([unknown, one.handle, "nowhere/1"], soon()))
    run(plane.delete([], soon()))
    get(plane, {"x": [(two.handle, 0, 2)]})


def test_unconfirmed_blocks_are_listed_until_confirmed_or_deleted(
    plane: DataPlane, partition: str
) -> None:
    one, two, three = (put(plane, {"x": random((2,))}, partition)[0].handle for _ in range(3))

    def listed(older_than: float = 0.0) -> set[str]:
        return set(run(plane.unconfirmed(older_than, soon())).get(partition, []))

    assert listed() == {one, two, three}
    assert listed(older_than=60) == set()
    run(plane.confirm([one, "nowhere/1"], soon()))
    assert listed() == {two, three}
    run(plane.delete([two], soon()))
    assert listed() == {three}
    get(plane, {"x": [(one, 0, 2)]})


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        ({}, None),
        ({"a": torch.ones(0, 3)}, "a"),
        ({"a": torch.ones(3), "b": torch.ones(2)}, "b"),
        ({"a": torch.ones(2), "b": [1, object()]}, "b"),
        ({"a": torch.ones(2), "b": torch.ones(2).to_sparse()}, "b"),
        ({"a": torch.tensor(1)}, "a"),
    ],
    ids=["no field", "no rows", "lengths", "value", "layout", "no batch"],
)
def test_bad_input_writes_nothing(
    plane: DataPlane, partition: str, columns: dict[str, Any], field: str | None
) -> None:
    with pytest.raises(InputError) as raised:
        put(plane, columns, partition)
    assert field is None or field in raised.value.fields
    assert partition not in run(plane.unconfirmed(0.0, soon()))


def test_two_clients_share_the_blocks(config: Config, units: Units, plane: DataPlane) -> None:
    column = random((2, 3))
    (block,) = put(plane, {"x": column})
    other = open_plane(config, units)
    assert_same(get(other, {"x": [(block.handle, 0, 2)]})["x"], column)
    run(other.close())
    assert_same(get(plane, {"x": [(block.handle, 0, 2)]})["x"], column)


def test_one_client_in_many_threads_mixes_nothing_up(plane: DataPlane) -> None:
    dtypes = [torch.int64, torch.float16, torch.bool, torch.uint8]

    def work(thread: int) -> None:
        for turn in range(6):
            size = 1 + 7 * thread + turn
            columns: dict[str, Column] = {
                "x": random((3, size), dtypes[(thread + turn) % 4]),
                "v": [(thread, turn), None, "x" * size],
            }
            got = get(plane, all_rows(put(plane, columns)))
            for field, column in columns.items():
                assert_same(got[field], column)

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(work, range(16)))


def test_many_calls_at_once_in_one_loop(plane: DataPlane) -> None:
    columns = [random((3, size)) for size in range(1, 33)]

    async def one(column: torch.Tensor) -> Column:
        blocks = await plane.put("p", {"x": column}, soon())
        return (await plane.get(all_rows(blocks), soon()))["x"]

    async def together() -> list[Column]:
        return await asyncio.gather(*map(one, columns))

    for got, column in zip(run(together()), columns, strict=True):
        assert_same(got, column)


def test_whole_blocks_are_read_and_written_again_bit_by_bit(
    plane: DataPlane, partition: str
) -> None:
    """As a checkpoint does; the copies are blocks of their own."""
    columns: dict[str, Column] = {
        **tensor_columns(),
        **value_columns(),
        "big": random((ROWS, 50_000)),
    }
    written = put(plane, columns, partition)
    assert len(written) > 1
    old = [block.handle for block in written]
    contents = run(plane.read_blocks([*old, old[0]], soon()))
    assert len(contents) == len(old) + 1
    new = run(plane.write_blocks(partition, contents[:-1], soon()))
    before = get(plane, all_rows(written))
    run(plane.delete(old, soon()))
    with pytest.raises(DataLostError) as lost:
        run(plane.read_blocks([new[0], old[0]], soon()))
    assert lost.value.handles == (old[0],)
    copies = [
        WrittenBlock(handle, block.schema, block.first_row, block.rows, block.nbytes)
        for handle, block in zip(new, written, strict=True)
    ]
    after = get(plane, all_rows(copies))
    for name in columns:
        assert_same(after[name], before[name])
    run(plane.delete(new, soon()))
