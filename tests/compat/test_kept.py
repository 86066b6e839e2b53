"""What a run of verl that died had finished, and the prompts of the run that goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import redis
import torch
from tensordict import TensorDict

from tests.compat.conftest import Start
from tests.compat.peer import IS_PEER, stack, tq
from tq_redis.compat.kept import KeptTrajectories, identity

pytestmark = pytest.mark.skipif(IS_PEER, reason="ours alone")

STEP = 7
# c is another group of the same prompt as a.
QUESTIONS = {"a": ("cat", 0), "b": ("dog", 1), "c": ("cat", 0)}


def prompt(uid: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": QUESTIONS[uid][0]}]


def name(uid: str) -> str | None:
    return identity(prompt(uid), QUESTIONS[uid][1])


def answer(uid: str, session: int, *, step: int = STEP, outputs: int = 1, **tag: Any) -> None:
    """A trajectory, as verl's agent loop writes it."""
    tokens = [torch.tensor([session, output, 3][: 2 + output % 2]) for output in range(outputs)]
    tq.kv_batch_put(
        [f"{uid}_{session}_{output}" for output in range(outputs)],
        "train",
        TensorDict(
            {
                "responses": torch.nested.as_nested_tensor(tokens, layout=torch.jagged),
                "uid": stack(*[uid] * outputs),
                "raw_prompt": stack(*[prompt(uid)] * outputs),
                "index": stack(*[QUESTIONS[uid][1]] * outputs),
                "extra_fields": stack(*[{"acc": np.float32(0.5)}] * outputs),
            },
            batch_size=outputs,
        ),
        [{"status": "success", "global_steps": step, "seq_len": 9, **tag}] * outputs,
    )


def group(uid: str, status: str, step: int = STEP) -> None:
    tag = {"is_prompt": True, "status": status, "global_steps": step}
    tq.kv_batch_put([uid], "train", tags=[tag])


@pytest.fixture
def died(start: Start) -> None:
    """A run with two prompts of two sessions, of which three are finished."""
    start()
    group("a", "finished")
    group("b", "running")
    answer("a", 0)
    answer("a", 1, outputs=2)
    answer("b", 1)
    tq.kv_put("v", "val", tag={"is_prompt": True, "status": "finished", "global_steps": STEP})


def keys() -> set[str]:
    return set(tq.kv_list("train").get("train", {}))


@pytest.mark.usefixtures("died")
def test_finished_sessions_get_the_new_names_of_their_prompts() -> None:
    before = tq.kv_batch_get(["a_1_0", "a_1_1"], "train")

    given = KeptTrajectories().give(STEP, ["new-b", "new-a"], [name("b"), name("a")], [2, 2])

    assert given == [[1], [0, 1]]
    assert keys() == {"new-b_1_0", "new-a_0_0", "new-a_1_0", "new-a_1_1"}
    after = tq.kv_batch_get(["new-a_1_0", "new-a_1_1"], "train")
    assert list(after["uid"]) == ["new-a", "new-a"]
    assert set(after.keys()) == set(before.keys())
    assert [row.tolist() for row in after["responses"].unbind()] == [[1, 0], [1, 1, 3]]
    assert list(after["extra_fields"]) == [{"acc": 0.5}] * 2
    assert tq.kv_list("train")["train"]["new-b_1_0"] == {
        "status": "success",
        "global_steps": STEP,
        "seq_len": 9,
    }


@pytest.mark.usefixtures("died")
def test_nothing_of_the_dead_run_is_marked_as_a_group_of_prompts() -> None:
    kept = KeptTrajectories()

    assert keys() == {"a_0_0", "a_1_0", "a_1_1", "b_1_0"}
    assert "val" not in tq.kv_list()
    assert kept.size == 4


@pytest.mark.usefixtures("died")
def test_what_other_weights_made_is_dropped() -> None:
    assert KeptTrajectories().give(STEP + 1, ["new"], [name("a")], [2]) == [[]]
    assert keys() == set()


@pytest.mark.usefixtures("died")
def test_what_the_step_does_not_ask_for_is_dropped_with_the_next_one() -> None:
    kept = KeptTrajectories()

    assert kept.give(STEP, ["new-a"], [name("a")], [1]) == [[0]]
    assert kept.give(STEP, ["other"], [identity("other words", 0)], [2]) == [[]]
    assert kept.give(STEP + 1, ["next"], [name("b")], [2]) == [[]]
    assert keys() == {"new-a_0_0"}
    assert kept.size == 0


@pytest.mark.usefixtures("died")
def test_a_trajectory_is_given_once_where_a_step_has_a_prompt_twice() -> None:
    answer("c", 0)
    given = KeptTrajectories().give(STEP, ["x", "y"], [name("a")] * 2, [2, 2])

    assert sorted(given) == [[0], [0, 1]]
    assert len(keys()) == 5  # and that of b


@pytest.mark.usefixtures("died")
def test_padding_and_other_keys_are_no_trajectories() -> None:
    tq.kv_put("pad_0_0", "train", tag={"status": "success", "is_padding": True})
    tq.kv_put("mine", "train", tag={"status": "success"})

    assert KeptTrajectories().size == 4


@pytest.mark.usefixtures("died")
def test_a_trajectory_that_lacks_what_names_its_prompt_is_generated_again() -> None:
    tag = {"status": "success", "global_steps": STEP}
    tq.kv_put("c_0_0", "train", {"responses": torch.ones(2)}, tag)

    KeptTrajectories().give(STEP, ["new-a"], [name("a")], [2])

    assert "c_0_0" not in keys()


@pytest.mark.usefixtures("died")
def test_nothing_is_kept_once_bytes_were_lost(redis_url: str, namespace: str) -> None:
    """They may have been anybody's: reads pass over a field that is lost."""
    with redis.Redis.from_url(redis_url) as admin:
        admin.hset(f"tq:{namespace}:{{train}}", "lost", 1)

    assert KeptTrajectories().size == 0
    assert keys() == set()


@pytest.mark.parametrize("value", [[{"content": np.int64(3)}], "words", [[1, None]]])
def test_plain_prompts_have_a_name(value: Any) -> None:
    assert identity(value, np.int64(1)) == identity(value, 1) is not None


def test_prompts_that_are_not_plain_have_none() -> None:
    assert identity([{"image": object()}], 1) is None
