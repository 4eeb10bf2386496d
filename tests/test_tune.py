"""Tuning: the search over settings on known machines, and the file that it writes."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from app.settings import Settings
from app.tune import LEAST_GAIN, Candidate, Tuning, on_this_machine, tune, write_settings


async def run(tuning, speed):
    async def measure(values):
        return Candidate(values, speed(values))

    return [candidate async for candidate in tune(tuning, measure)]


def a_tuning():
    return Tuning({"engine_threads": (1, 2, 4), "encoders_per_step": (1, 2)})


async def test_the_best_value_of_each_setting_stays_while_the_next_is_tried():
    tuning = a_tuning()
    tried = await run(tuning, lambda v: {1: 10, 2: 18, 4: 12}[v["engine_threads"]] * v["encoders_per_step"])
    assert tuning.chosen == {"engine_threads": 2, "encoders_per_step": 2}
    assert [tuple(candidate.values.values()) for candidate in tried] == [(1, 1), (2, 1), (4, 1), (2, 2)]  # none twice


async def test_what_gains_little_is_not_worth_more_threads():
    tuning = a_tuning()
    await run(tuning, lambda v: 10 + 0.1 * v["engine_threads"])
    assert tuning.chosen == {"engine_threads": 1, "encoders_per_step": 1}


@given(st.lists(st.floats(1, 100), min_size=6, max_size=6))
async def test_what_is_chosen_was_measured_and_is_not_much_worse_than_any_that_was(speeds):
    table = {(a, b): speeds[i] for i, (a, b) in enumerate((a, b) for a in (1, 2, 4) for b in (1, 2))}
    tuning = a_tuning()
    tried = await run(tuning, lambda v: table[v["engine_threads"], v["encoders_per_step"]])
    assert len({tuple(candidate.values.items()) for candidate in tried}) == len(tried)
    chosen = next(candidate for candidate in tried if candidate.values == tuning.chosen)
    assert chosen.rtfx * (1 + LEAST_GAIN) ** 3 >= max(candidate.rtfx for candidate in tried)


def test_every_setting_that_is_tried_is_one_and_small_values_come_first():
    for name, values in on_this_machine().values.items():
        assert name in Settings.model_fields
        assert all(a < b for a, b in pairwise(values))


def test_the_file_keeps_what_else_it_says(tmp_path):
    path = tmp_path / ".env"
    path.write_text("STENO_MODEL=tiny.en\n# mine\nsteno_engine_threads = 9\nOTHER=1\n")
    write_settings(path, {"engine_threads": 2, "encoders_per_step": 1})
    assert path.read_text() == "STENO_MODEL=tiny.en\n# mine\nOTHER=1\nSTENO_ENGINE_THREADS=2\nSTENO_ENCODERS_PER_STEP=1\n"
    settings = Settings(_env_file=path)
    assert (settings.model, settings.engine_threads, settings.encoders_per_step) == ("tiny.en", 2, 1)
    write_settings(tmp_path / "new", {"engine_threads": 2})
    assert (tmp_path / "new").read_text() == "STENO_ENGINE_THREADS=2\n"
