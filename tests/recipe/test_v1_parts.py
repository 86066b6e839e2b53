"""What a sample of verl's trainer is called from run to run."""

from __future__ import annotations

from recipe.v1.identity import sample_order, sample_seed


def test_samples_are_ordered_by_data_row_session_and_output() -> None:
    keys = ["b_10_0", "a_2_1", "b_2_0", "a_2_0"]

    order = sample_order(keys, rows=[3, 8, 3, 8])

    assert [keys[place] for place in order] == ["b_2_0", "b_10_0", "a_2_0", "a_2_1"]


def test_every_sample_of_a_run_has_a_seed_of_its_own() -> None:
    names = [
        (s, step, row, n) for s in (0, 1) for step in (1, 2) for row in (1, 12) for n in (2, 3)
    ]

    seeds = [sample_seed(*name) for name in names]

    assert len(set(seeds)) == len(names)
    assert seeds == [sample_seed(*name) for name in names]
    assert all(0 <= seed < 2**63 for seed in seeds)
