"""Work in the body of ``hold``, where the heartbeat has a hard time."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import tq_redis as tq

ROWS = 200
SHORT_S = 0.5


def put(client: tq.Client) -> None:
    client.put({"x": torch.arange(float(ROWS))}, partition_id="p")


def take(client: tq.Client, rows: int) -> tq.BatchMeta:
    return client.get_meta(["x"], rows, "p", task_name="t", lease=SHORT_S)


def test_hold_while_the_body_keeps_the_interpreter_busy(client: tq.Client) -> None:
    """Many times as long as the lease; another consumer asks all the time."""
    put(client)
    lost: list[tq.BatchMeta] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            found = client.get_meta(["x"], 1, "p", task_name="t", timeout=0)
            if found.size:
                lost.append(found)
            done.wait(0.05)

    other = threading.Thread(target=ask)
    with client.hold(take(client, ROWS)):
        other.start()
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            sum(range(1000))
        done.set()
        other.join()
    assert lost == []
    assert client.check_consumption_status("t", "p")


def test_a_part_is_acknowledged_in_the_body(client: tq.Client) -> None:
    """That claim has ended then; the leases of the others are renewed as before."""
    put(client)
    first, second, third = (take(client, rows) for rows in (50, 50, 100))
    with client.hold(tq.BatchMeta.concat([first, second, third])):
        client.ack(first)
        client.ack(third)
        end = time.monotonic() + 3 * SHORT_S
        while time.monotonic() < end:
            assert client.get_meta(["x"], 1, "p", task_name="t", timeout=0).size == 0
            time.sleep(0.05)
    assert client.check_consumption_status("t", "p")


def test_a_heartbeat_that_outlives_its_partition(client: tq.Client) -> None:
    """Claims are counted anew in a partition made anew: it must not renew a stranger's."""
    put(client)
    old = take(client, 4)
    client.clear_partition("p")
    put(client)
    new = take(client, 4)
    assert new.claims == old.claims
    with pytest.raises(tq.LeaseLostError):
        client.renew(old, 60.0)
    assert take(client, ROWS).global_indexes[:4] == new.global_indexes  # within the lease
