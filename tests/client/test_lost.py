"""Blocks are gone behind the queue's back: what readers are told, and who makes the rows again."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tq_redis as tq
from tq_redis.deadline import Deadline

Lose = Callable[..., None]


@pytest.fixture
def lose(client: tq.Client) -> Lose:
    """``lose(meta, *fields)``: the blocks that these cells lie in are gone, as with a store."""
    core = client._core

    def delete(meta: tq.BatchMeta, *fields: str) -> None:
        deadline = Deadline(20)
        where = client._portal.run(core._locate(meta, list(fields), deadline))
        handles = {run[0] for runs in where.values() for run in runs}
        client._portal.run(core.data.delete(handles, deadline))

    return delete


def prompts(client: tq.Client, rows: int = 4, partition: str = "p") -> tq.BatchMeta:
    return client.put({"x": torch.arange(float(rows))}, partition_id=partition)


def generate(client: tq.Client, rows: int = 4, **options: Any) -> tq.BatchMeta:
    """One round of the producing task: ``y`` is ten times ``x``."""
    meta = client.get_meta(["x"], rows, "p", task_name="gen", timeout=10, **options)
    return client.put({"y": 10 * client.get_columns(meta)["x"]}, meta)


def test_what_is_lost_is_made_again(client: tq.Client, lose: Lose) -> None:
    prompts(client)
    parts = [generate(client, 2), generate(client, 2)]
    batch = client.get_meta(["x", "y"], 4, "p", task_name="train")
    lose(parts[1], "y")

    with pytest.raises(tq.DataLostError) as caught:
        client.get_columns(batch)

    error = caught.value
    lost = parts[1].global_indexes
    assert (error.partition, error.fields, error.rows) == ("p", ("y",), tuple(lost))
    assert f"['y'] are gone for rows {lost} of partition 'p'" in str(error)
    assert f"not produced any more; task 'gen' can claim rows {lost} again" in str(error)
    assert "put them again" not in str(error)
    # The others can be got, and so can the other field.
    assert client.get_columns(batch[:2])["y"].tolist() == [0.0, 10.0]
    assert client.get_columns(batch, ["x"])["x"].tolist() == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(tq.NotReadyError) as waits:
        client.get_columns(batch)
    assert (waits.value.fields, waits.value.rows) == (("y",), tuple(lost))
    # Another worker of the task makes them, and the reader goes on.
    assert generate(client, 2).global_indexes == lost
    assert client.get_columns(batch)["y"].tolist() == [0.0, 10.0, 20.0, 30.0]
    assert client.get_meta(["x"], 1, "p", task_name="gen", timeout=0).size == 0
    summary = client.get_summary("p")
    assert [summary[name] for name in ("produced:y", "consumed:gen", "lost")] == [4, 4, 2]


def test_rows_without_a_task_are_to_be_put_again(client: tq.Client, lose: Lose) -> None:
    meta = prompts(client)
    done = generate(client)
    lose(meta, "x")
    lose(done, "y")
    with pytest.raises(tq.DataLostError, match="can claim rows .* again; no task can write all"):
        client.get_columns(done)
    assert client.get_meta(["x"], 1, "p", task_name="gen", timeout=0).size == 0
    client.put({"x": torch.arange(4.0)}, meta)
    generate(client)
    assert client.get_columns(done)["y"].tolist() == [0.0, 10.0, 20.0, 30.0]


def test_the_error_lists_exactly_the_lost_rows(client: tq.Client, lose: Lose) -> None:
    """In the order of no put, with a row twice, of two partitions, and filled up."""
    one, two = prompts(client, 3, "one"), prompts(client, 3, "two")
    more = client.put({"x": torch.ones(2)}, partition_id="one")
    batch = tq.BatchMeta.concat([two, one, more]).select_samples([7, 0, 3, 6, 1, 3]).padded(4)
    lose(one, "x")
    lose(two, "x")
    with pytest.raises(tq.DataLostError) as caught:
        client.get_columns(batch)
    assert caught.value.rows == (
        one.global_indexes[0],
        two.global_indexes[0],
        two.global_indexes[1],
    )
    for name, left in (("one", 4), ("two", 1)):
        assert f"In partition {name!r} they are not produced any more" in str(caught.value)
        assert client.get_summary(name)["produced:x"] == left
    assert client.get_columns(batch.select_samples([0, 3]))["x"].tolist() == [1.0, 1.0]


def test_a_reader_keeps_its_lease(client: tq.Client, lose: Lose) -> None:
    prompts(client)
    done = generate(client, 2)
    generate(client, 2)
    batch = client.get_meta(["x", "y"], 4, "p", task_name="train", lease=60)
    lose(done, "y")
    with pytest.raises(tq.DataLostError) as caught:
        client.get_columns(batch)
    lost = [batch.global_indexes.index(row) for row in caught.value.rows]
    client.release(batch.select_samples(lost))
    client.ack(batch.select_samples([row for row in range(4) if row not in lost]))
    generate(client, 2)
    again = client.get_meta(["x", "y"], 2, "p", task_name="train", lease=60)
    assert again.global_indexes == done.global_indexes
    client.ack(again)
    assert client.get_summary("p")["consumed:train"] == 4


def test_the_writer_learns_that_its_lease_ended(client: tq.Client, lose: Lose) -> None:
    prompts(client)
    done = generate(client, lease=60)
    lose(done, "y")
    with pytest.raises(tq.DataLostError):
        client.get_columns(done)
    with pytest.raises(tq.LeaseLostError) as caught:
        client.ack(done)
    assert caught.value.rows == tuple(done.global_indexes)
    assert generate(client).global_indexes == done.global_indexes


def test_many_readers_meet_the_same_loss(client: tq.Client, lose: Lose) -> None:
    """It is counted once, and so is every row that comes back."""
    prompts(client)
    done = generate(client)
    lose(done, "y")
    errors: list[BaseException] = []

    def read() -> None:
        try:
            client.get_columns(done)
        except (tq.DataLostError, tq.NotReadyError) as error:
            errors.append(error)

    readers = [threading.Thread(target=read) for _ in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(30)
    assert len(errors) == 8
    assert any(isinstance(error, tq.DataLostError) for error in errors)
    summary = client.get_summary("p")
    counters = ("produced:y", "consumed:gen", "lost", "samples")
    assert [summary[name] for name in counters] == [0, 0, 4, 4]
    assert generate(client).global_indexes == done.global_indexes


def test_a_loss_that_cannot_be_noted_is_told_all_the_same(client: tq.Client, lose: Lose) -> None:
    """Here the partition stands still for a checkpoint."""
    prompts(client)
    done = generate(client)
    lose(done, "y")
    control, run = client._core.control, client._portal.run
    run(control.freeze("p", "a save", "all", 60.0, Deadline(20), first=True))
    with pytest.raises(tq.DataLostError) as caught:
        client.get_columns(done, timeout=1)
    run(control.freeze("p", "a save", "none", 60.0, Deadline(20)))

    assert caught.value.rows == tuple(done.global_indexes)
    (note,) = caught.value.__notes__
    assert "'p' has them as produced until they are read again" in note
    assert "is being saved" in note
    assert pickle.loads(pickle.dumps(caught.value)).__notes__ == [note]
    assert client.get_summary("p")["produced:y"] == 4
    with pytest.raises(tq.DataLostError, match="task 'gen' can claim") as again:
        client.get_columns(done)
    assert not hasattr(again.value, "__notes__")


def test_a_deadline_is_no_loss(client: tq.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store may only be slow."""
    prompts(client)
    done = generate(client)

    async def late(*args: Any, **options: Any) -> Any:
        raise tq.DeadlineError("The store did not answer", deadline=1.0)

    with monkeypatch.context() as patch:
        patch.setattr(client._core.data, "get", late)
        with pytest.raises(tq.DeadlineError):
            client.get_columns(done)
    summary = client.get_summary("p")
    assert (summary["produced:y"], summary["consumed:gen"], "lost" in summary) == (4, 4, False)
    assert client.get_columns(done, ["y"])["y"].tolist() == [0.0, 10.0, 20.0, 30.0]


@pytest.mark.parametrize("rows", [4, 3])
def test_what_is_written_again_while_it_is_read(
    client: tq.Client, lose: Lose, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """All of it: the reader gets it. Some of it: the rest is lost."""
    meta = prompts(client)
    core, get = client._core, client._core.data.get
    met: list[int] = []

    async def get_late(*args: Any, **options: Any) -> Any:
        if not met:  # the reader has looked where the bytes are
            met.append(1)
            runs = next(iter(args[0].values()))
            await core.put({"x": torch.full((rows,), 7.0)}, meta[:rows])
            await core.data.delete([runs[0][0]], Deadline(20))
        return await get(*args, **options)

    monkeypatch.setattr(core.data, "get", get_late)
    if rows == 4:
        assert client.get_columns(meta)["x"].tolist() == [7.0] * 4
        assert "lost" not in client.get_summary("p")
        return
    with pytest.raises(tq.DataLostError) as caught:
        client.get_columns(meta)
    assert caught.value.rows == (meta.global_indexes[3],)
    assert client.get_summary("p")["produced:x"] == 3
    assert client.get_columns(meta[:3])["x"].tolist() == [7.0] * 3


def test_cleared_samples_are_cleared_and_not_lost(client: tq.Client, lose: Lose) -> None:
    meta = prompts(client)
    lose(meta, "x")
    client.clear_samples(meta)
    with pytest.raises(tq.SampleNotFoundError):
        client.get_columns(meta)


def test_a_large_batch_of_many_blocks(client: tq.Client, lose: Lose) -> None:
    fields = {f"f{number}": torch.arange(3000.0) for number in range(4)}
    prompts(client, 3000)
    meta = client.get_meta(["x"], 3000, "p", task_name="gen")
    parts = [
        client.put({name: column[row : row + 60] for name, column in fields.items()}, part)
        for part in meta.chunk(50)
        for row in [part.global_indexes[0] - meta.global_indexes[0]]
    ]
    done = tq.BatchMeta.concat(parts)
    assert done.task == "gen"
    lose(done, *fields)
    with pytest.raises(tq.DataLostError) as caught:
        client.get_columns(done, list(fields))
    assert caught.value.rows == tuple(meta.global_indexes)
    assert caught.value.fields == tuple(fields)
    again = client.get_meta(["x"], 3000, "p", task_name="gen")
    assert again.global_indexes == meta.global_indexes
    client.put(fields, again)
    assert torch.equal(client.get_columns(done, ["f3"])["f3"], fields["f3"])


def test_which_task_wrote_travels_with_the_metadata(client: tq.Client, lose: Lose) -> None:
    made = prompts(client)
    assert made.task is None
    meta = client.get_meta(["x"], 4, "p", task_name="gen", lease=60)
    assert meta.task == "gen"
    sent = [pickle.loads(pickle.dumps(part)) for part in meta.padded(3).chunk(2)]
    parts = [client.put({"y": torch.ones(len(part.unpadded()))}, part.unpadded()) for part in sent]
    done = tq.BatchMeta.concat(parts)
    assert done.task == "gen"
    assert client.get_meta(["y"], 0, "p", mode="force_fetch").task is None
    lose(done, "y")
    with pytest.raises(tq.DataLostError, match="task 'gen' can claim rows"):
        client.get_columns(done, ["y"])


def test_values_under_keys_have_no_task(client: tq.Client, lose: Lose) -> None:
    client.kv_batch_put(["a", "b"], fields={"x": torch.arange(2.0)}, partition_id="p")
    meta = client.get_meta(["x"], 2, "p", task_name="train")
    lose(meta, "x")
    with pytest.raises(tq.DataLostError, match="put them again, or clear them"):
        client.kv_batch_get(["a", "b"], "p")
    client.kv_batch_put(["a", "b"], fields={"x": torch.arange(2.0)}, partition_id="p")
    assert client.get_columns(meta)["x"].tolist() == [0.0, 1.0]


def test_a_checkpoint_knows_who_wrote(client: tq.Client, lose: Lose, tmp_path: Path) -> None:
    prompts(client)
    done = generate(client)
    client.save_checkpoint(tmp_path / "queue")
    client.load_checkpoint(tmp_path / "queue")
    assert client.get_meta(["x"], 1, "p", task_name="gen", timeout=0).size == 0
    lose(done, "y")
    with pytest.raises(tq.DataLostError, match="task 'gen' can claim rows"):
        client.get_columns(done)
    assert generate(client).global_indexes == done.global_indexes
