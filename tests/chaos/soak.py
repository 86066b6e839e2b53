"""64 clients in 8 processes that are killed now and then; every sample is consumed exactly once.

    python -m tests.chaos.soak --seed 1                    # one round of 100,000 samples
    python -m tests.chaos.soak --seed 1 --minutes 30       # rounds with seeds 1, 2, 3, ...

It lies here and not in ``benchmarks`` since it measures nothing: it fails or it does not. It starts
a server of its own; ``TQ_TEST_SERVER`` picks which.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import redis

from tests.chaos import verdict
from tests.chaos.load import GROUP_SIZE, PARTITION, Consumer, Journal, Task, produce
from tests.conftest import server_binary
from tests.control.state import Admin
from tq_redis.config import RedisConfig
from tq_redis.control.connection import RedisConnection
from tq_redis.control.plane import ControlPlane
from tq_redis.redis_server import start_server

PROCESSES = 8
CLIENTS = 8
KILLS = 3
LEASE_S = 2.0
IDLE_TTL_S = 3600
STALL_S = 20.0

TASKS = (
    Task("actor", 0, 256, LEASE_S),
    Task("critic", 0, 96, LEASE_S),
    Task("group", GROUP_SIZE, 240, LEASE_S),
)

# Forked from this process, which has no thread and no event loop: the imports are made once, and a
# process that was killed is replaced within milliseconds.
_fork = multiprocessing.get_context("fork")


def run_round(url: str, seed: int, samples: int) -> str:
    """One round.

    Returns:
        What happened, in a line.

    Raises:
        AssertionError: a sample was not consumed exactly once, or a process failed.
    """
    began = time.monotonic()
    namespace = f"soak-{seed}"
    chance = random.Random(seed)
    with (
        tempfile.TemporaryDirectory(prefix="tq-soak-") as folder,
        redis.Redis.from_url(url, decode_responses=True) as admin,
    ):
        crew = _Crew(url, namespace, seed, Path(folder), samples)
        try:
            finished = _kill_now_and_then(crew, admin, chance, samples * len(TASKS))
        finally:
            crew.end()
        journals = verdict.Journals(Path(folder))
        names = [task.name for task in TASKS]
        verdict.check(admin, crew.key, names, samples, journals)
        assert finished, f"no sample was consumed for {STALL_S} s, though all are"
        told = sum(len(by_sample) for by_sample in journals.told.values())
        return (
            f"seed {seed}: {samples} samples x {len(TASKS)} tasks in "
            f"{time.monotonic() - began:.1f} s; {len(journals.killed)} of {len(journals.lives)} "
            f"client lives ended by kill -9; {samples * len(TASKS) - told} acknowledgements were "
            f"answered to nobody"
        )


class _Crew:
    """The processes of a round."""

    def __init__(self, url: str, namespace: str, seed: int, folder: Path, samples: int) -> None:
        self._common = (url, namespace)
        self._seed = seed
        self._folder = folder
        self._started = 0
        self.key = f"tq:{namespace}:{{{PARTITION}}}"
        self.producer = self._start(_produce, samples)
        self.consumers = [self._start(_consume, folder) for _ in range(PROCESSES)]

    def kill(self, place: int) -> None:
        """Kill a process with its clients; another takes its place."""
        victim = self.consumers[place]
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        self.consumers[place] = self._start(_consume, self._folder)

    def running(self) -> list[int]:
        """Places of consumers that have not finished."""
        return [place for place, each in enumerate(self.consumers) if each.is_alive()]

    def check(self) -> None:
        for each in (self.producer, *self.consumers):
            assert each.exitcode in (None, 0), f"{each.name} failed: exit code {each.exitcode}"

    def end(self) -> None:
        for each in (self.producer, *self.consumers):
            each.kill()
            each.join()

    def _start(self, work: Any, last: Any) -> BaseProcess:
        self._started += 1
        number = 1000 * self._seed + self._started
        process = _fork.Process(target=work, args=(*self._common, number, last))
        process.start()
        return process


def _kill_now_and_then(crew: _Crew, admin: Admin, chance: random.Random, total: int) -> bool:
    """At points of the progress that the seed chooses. False: it came to a halt."""
    anyone: Any = admin
    points = sorted(chance.uniform(0.05, 0.9) * total for _ in range(KILLS))
    names = [f"consumed:{task.name}" for task in TASKS]
    done, since = -1, time.monotonic()
    while crew.running():
        crew.check()
        consumed = sum(int(n or 0) for n in anyone.hmget(crew.key, names))
        if consumed != done:
            done, since = consumed, time.monotonic()
        elif time.monotonic() > since + STALL_S:
            return False
        if points and consumed >= points[0]:
            del points[0]
            crew.kill(chance.choice(crew.running()))
        time.sleep(0.02)
    crew.producer.join()
    crew.check()
    return True


def _consume(url: str, namespace: str, number: int, folder: Path) -> None:
    async def client(place: int) -> None:
        chance = random.Random(1000 * number + place)
        journal = Journal(folder / f"{number}-{place}.log")
        tasks = list(TASKS)
        life = 0
        while tasks:
            connection = RedisConnection(url, RedisConfig(max_connections=2))
            plane = ControlPlane(connection, namespace, IDLE_TTL_S)
            life += 1
            consumer = Consumer(plane, f"{number}-{place}-{life}", chance, journal)
            await consumer.live(tasks, batches=chance.randint(1, 4))
            await plane.close()
        journal.close()

    async def clients() -> None:
        async with asyncio.TaskGroup() as group:
            for place in range(CLIENTS):
                group.create_task(client(place))

    asyncio.run(clients())


def _produce(url: str, namespace: str, number: int, samples: int) -> None:
    async def put() -> None:
        plane = ControlPlane(RedisConnection(url, RedisConfig()), namespace, IDLE_TTL_S)
        await produce(plane, samples, random.Random(number))
        await plane.close()

    asyncio.run(put())


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--samples", type=int, default=100_000, help="a multiple of 4")
    parser.add_argument("--minutes", type=float, default=0, help="0: one round")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    seed = options.seed
    while True:
        with start_server(binary=server_binary(os.environ.get("TQ_TEST_SERVER", "valkey9"))) as own:
            try:
                _say(run_round(own.url, seed, options.samples))
            except AssertionError as error:
                _say(f"seed {seed}: {error}")
                return 1
        seed += 1
        if time.monotonic() >= end:
            return 0


if __name__ == "__main__":
    sys.exit(main())
