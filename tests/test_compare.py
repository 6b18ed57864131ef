"""Comparisons of synthetic run folders whose numbers are known, and the statistics against tables."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from io import StringIO
from pathlib import Path
from statistics import NormalDist

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spear_rl.app.compare import (
    arms_of,
    compare,
    comparison_of,
    curve,
    load_run,
    over_seeds,
    over_tasks,
    pairs_of,
    sign_test,
    t_quantile,
    warnings_of,
)
from spear_rl.app.config import load, to_toml
from spear_rl.errors import MissingExtraError, UserError
from spear_rl.io.jsonl import gaps, spans

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
TASKS = 20


def rate(success):
    return {"success": success, "low": max(success - 0.2, 0.0), "high": min(success + 0.2, 1.0), "episodes": TASKS}


def write_run(path, algorithm="grpo", seed=0, *, after=0.5, before=0.1, steps=10, finished=True, taken=None, extra=()):
    """A run folder: reward is the step, and the last evaluation solves the first `after` of the tasks."""
    path.mkdir(parents=True)
    overrides = [f"algorithm.name={algorithm}", f"run.seed={seed}", f"run.steps={steps}", f"run.dir={path}", *extra]
    (path / "config.toml").write_text(to_toml(load("lookup", overrides)))
    taken = steps if taken is None else taken
    with (path / "metrics.jsonl").open("w") as file:
        for step in range(taken):
            row = {"step": step, "rollout/success": step / steps, "rollout/reward": float(step), "time/step": 2.0}
            row |= {"policy/entropy": 1.0 - step / steps, "rollout/tool_turns": 1.5}
            if algorithm.startswith("spear-"):
                row |= {"replay/trajectories": 4.0 * step, "replay/fired": float(step > 0)}
            file.write(json.dumps(row) + "\n")
    with (path / "eval.jsonl").open("w") as file:
        for step, success in ((0, before), (taken, after)):
            solved = {f"task{i}": float(i < round(success * TASKS)) for i in range(TASKS)}
            file.write(json.dumps({"step": step, "reward": success, "solved": solved} | rate(success)) + "\n")
    if finished:
        summary = {"steps": taken, "success_before": rate(before), "success_after": rate(after)}
        (path / "summary.json").write_text(json.dumps(summary))
    return path


def compared(paths):
    """The comparison without its files, which take a second to draw."""
    return comparison_of([load_run(path) for path in paths], Path("out"))


def two_arms(root, base=(0.4, 0.5, 0.6), spear=(0.5, 0.65, 0.65)):
    """grpo and spear-grpo, one run each a success after, on the same seeds."""
    runs = [write_run(root / f"grpo_{s}", "grpo", s, after=v) for s, v in enumerate(base)]
    return runs + [write_run(root / f"spear_{s}", "spear-grpo", s, after=v) for s, v in enumerate(spear)]


@pytest.mark.parametrize(
    ("freedom", "confidence", "expected"),
    [
        (1, 0.95, 12.7062), (2, 0.95, 4.3027), (3, 0.95, 3.1824), (4, 0.95, 2.7764), (5, 0.95, 2.5706),
        (9, 0.95, 2.2622), (10, 0.95, 2.2281), (30, 0.95, 2.0423), (120, 0.95, 1.9799), (1000, 0.95, 1.9623),
        (1, 0.5, 1.0), (2, 0.99, 9.9248), (7, 0.9, 1.8946), (12, 0.99, 3.0545),
    ],
)  # fmt: skip
def test_t_quantiles_are_those_of_the_printed_tables(freedom, confidence, expected):
    assert t_quantile(confidence, freedom) == pytest.approx(expected, abs=6e-5)


@quick
@given(st.integers(1, 300), st.floats(0.05, 0.995))
def test_t_quantiles_fall_with_the_degrees_of_freedom_towards_the_normal_ones(freedom, confidence):
    normal = NormalDist().inv_cdf((1 + confidence) / 2)
    assert t_quantile(confidence, freedom) > t_quantile(confidence, freedom + 1) > normal


@quick
@given(st.floats(0.05, 0.995))
def test_t_quantiles_of_one_and_two_degrees_have_their_closed_forms(confidence):
    assert t_quantile(confidence, 1) == pytest.approx(math.tan(math.pi * confidence / 2))
    assert t_quantile(confidence, 2) == pytest.approx(confidence * math.sqrt(2 / (1 - confidence**2)))


def test_an_interval_over_seeds_holds_the_mean_as_often_as_it_says():
    rng = random.Random(0)
    intervals = [over_seeds([rng.gauss(0.5, 0.1) for _ in range(3)]) for _ in range(2000)]
    assert sum(i.low < 0.5 < i.high for i in intervals) / 2000 == pytest.approx(0.95, abs=0.015)


def test_an_interval_over_tasks_holds_the_difference_as_often_as_it_says():
    rng = random.Random(0)
    draws = [[(rng.random() < 0.6) - (rng.random() < 0.5) for _ in range(64)] for _ in range(1000)]
    intervals = [over_tasks(differences) for differences in draws]
    assert sum(i.low < 0.1 < i.high for i in intervals) / 1000 == pytest.approx(0.95, abs=0.02)


@quick
@given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.5, 1.0]), min_size=1, max_size=80))
def test_an_interval_over_tasks_has_a_width_and_holds_the_mean_whatever_the_tasks(differences):
    found = over_tasks(differences)
    mirrored = over_tasks([-d for d in differences])
    assert -1 <= found.low < found.high <= 1
    assert found.low <= found.value <= found.high
    assert (mirrored.low, mirrored.high) == pytest.approx((-found.high, -found.low))


def test_the_sign_test_counts_coins():
    assert sign_test(0, 0) == 1.0
    assert sign_test(3, 3) == 1.0
    assert sign_test(5, 0) == sign_test(0, 5) == pytest.approx(2 / 32)
    assert sign_test(8, 2) == pytest.approx(2 * (1 + 10 + 45) / 1024)
    assert 0 <= sign_test(2000, 1000) < 1e-50


def test_a_finished_run_is_read_from_its_summary(tmp_path):
    run = load_run(write_run(tmp_path / "run", seed=3, after=0.75))
    assert (run.algorithm, run.seed, run.note) == ("grpo", 3, "")
    assert (run.before.value, run.after.value, run.after.low) == (0.1, 0.75, 0.55)
    assert run.settings["rollout.group_size"] == 8
    assert sum(run.solved.values()) == 15


def test_metrics_are_smoothed_over_the_last_five_steps(tmp_path):
    run = load_run(write_run(tmp_path / "run"))
    assert list(run.smoothed("rollout/reward").values()) == [0, 0.5, 1, 1.5, 2, 3, 4, 5, 6, 7]
    assert run.smoothed("replay/fired") == {}


def test_an_unfinished_run_is_used_as_far_as_it_came_and_its_half_line_forgotten(tmp_path):
    path = write_run(tmp_path / "run", finished=False, taken=6, after=0.3)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rollout/rew')
    run = load_run(path)
    assert run.note == "unfinished: 6 of 10 steps, success after is that at step 6"
    assert (run.before.value, run.after.value, max(run.rows)) == (0.1, 0.3, 5)
    assert any("unfinished" in text for text in compared([path]).warnings)


def test_a_summary_from_before_a_run_was_resumed_does_not_make_it_finished(tmp_path):
    path = write_run(tmp_path / "run", steps=10, taken=6)
    assert load_run(path).note.startswith("unfinished: 6 of 10 steps")


def test_a_run_evaluated_only_before_training_has_no_success_after(tmp_path):
    path = write_run(tmp_path / "run", finished=False)
    first = (path / "eval.jsonl").read_text().splitlines()[0]
    (path / "eval.jsonl").write_text(first + "\n")
    run = load_run(path)
    assert run.before is not None
    assert (run.after, run.solved) == (None, {})


def test_a_run_without_evaluations_and_with_gaps_in_its_metrics_still_compares(tmp_path):
    path = write_run(tmp_path / "run", finished=False)
    (path / "eval.jsonl").unlink()
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    del rows[3]["policy/entropy"]
    rows[4]["policy/entropy"] = math.nan
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    numbers = compare([path], tmp_path / "out").as_dict()
    assert numbers["arms"][0]["success_after"] is None
    assert numbers["curves"]["entropy"]["grpo"]["steps"] == [0, 1, 2, 5, 6, 7, 8, 9]
    assert numbers["curves"]["replayed"] == {}


def break_run(path, damage):
    if damage == "no config":
        (path / "config.toml").unlink()
    elif damage == "bad config":
        (path / "config.toml").write_text("= 3")
    elif damage == "no seed":
        (path / "config.toml").write_text('[algorithm]\nname = "grpo"\n[task]\nenv = "lookup"\n')
    elif damage == "no metrics":
        (path / "metrics.jsonl").unlink()
    elif damage == "empty metrics":
        (path / "metrics.jsonl").write_text("")
    elif damage == "bad line":
        (path / "metrics.jsonl").write_text('{"step": 0}\n{"step": \n{"step": 2}\n')
    elif damage == "no step":
        (path / "metrics.jsonl").write_text('{"step": 0}\n[1]\n')
    elif damage in ("far step", "step below 0"):
        step = 10**11 if damage == "far step" else -1
        (path / "metrics.jsonl").write_text(f'{{"step": 0}}\n{{"step": {step}}}\n')
    elif damage == "far evaluation":
        (path / "eval.jsonl").write_text('{"step": 1%s, "success": 0.5, "low": 0.4, "high": 0.6}\n' % ("0" * 400))
    elif damage == "deep config":
        (path / "config.toml").write_text("a" + ".a" * 2000 + " = 1\n")
    elif damage == "no share":
        (path / "eval.jsonl").write_text('{"step": 4, "success": 1e308, "low": 0.4, "high": 1.0}\n')
    elif damage == "bad eval":
        (path / "eval.jsonl").write_text('{"step": 0, "success": 0.5}\n')
    elif damage in ("bad split", "bad tasks"):
        odd = '"also": {"test": {"success": NaN}}' if damage == "bad split" else '"solved": 3'
        rate = '"step": 4, "success": 0.5, "low": 0.4, "high": 0.6'
        (path / "eval.jsonl").write_text(f"{{{rate}, {odd}}}\n")
    elif damage == "bad summary":
        (path / "summary.json").write_text("{")
    elif damage == "half a summary":
        (path / "summary.json").write_text('{"steps": 10, "success_after": {"success": 0.5}}')


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("no config", "is no run folder: it has no config.toml"),
        ("bad config", "config.toml is not valid TOML"),
        ("no seed", "config.toml does not say run.seed"),
        ("no metrics", "has no metrics"),
        ("empty metrics", "has no metrics"),
        ("bad line", "metrics.jsonl, line 2 is not valid JSON"),
        ("no step", "metrics.jsonl, line 2 is no JSON object with a step"),
        ("far step", "metrics.jsonl, line 2 is no JSON object with a step"),
        ("step below 0", "metrics.jsonl, line 2 is no JSON object with a step"),
        ("far evaluation", "eval.jsonl, line 1 is no JSON object with a step"),
        ("deep config", "config.toml is not valid TOML"),
        ("bad eval", "eval.jsonl, line 1 does not say low as a share"),
        ("no share", "eval.jsonl, line 1 does not say success as a share"),
        ("bad split", "eval.jsonl, the row of step 4 has no shares in solved or also"),
        ("bad tasks", "eval.jsonl, the row of step 4 has no shares in solved or also"),
        ("bad summary", "summary.json is not valid JSON"),
        ("half a summary", "summary.json, success_after does not say success, low, high"),
    ],
)
def test_what_is_no_whole_run_folder_is_named_with_what_is_wrong(tmp_path, damage, says):
    path = write_run(tmp_path / "some_run")
    break_run(path, damage)
    with pytest.raises(UserError) as error:
        load_run(path)
    assert str(path) in str(error.value)
    assert says in str(error.value)


@quick
@given(st.sets(st.integers(0, 30)), st.integers(0, 30))
def test_gaps_are_the_numbers_that_are_left_out(numbers, end):
    assert gaps(sorted(numbers), end) == spans(n for n in range(end) if n not in numbers)
    assert gaps(sorted(numbers), 10**9 + end).endswith(f"-{10**9 + end - 1}")


def test_a_missing_folder_no_folder_at_all_and_a_file_as_out_are_refused(tmp_path):
    with pytest.raises(UserError, match="nowhere is not a folder"):
        load_run(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no run to compare"):
        compare([], tmp_path)
    run = write_run(tmp_path / "run")
    with pytest.raises(UserError, match="is a file"):
        compare([run], run / "config.toml")


def test_runs_are_arms_by_algorithm_and_by_what_else_differs_with_each_base_first(tmp_path):
    off = ("algorithm.bonus.mode='none'",)
    runs = [
        write_run(tmp_path / "a", "spear-grpo", 0, extra=off),
        write_run(tmp_path / "b", "spear-grpo", 0, extra=("algorithm.bonus.mode='cosine'",)),
        write_run(tmp_path / "c", "gigpo", 0),
        write_run(tmp_path / "d", "grpo", 1),
        write_run(tmp_path / "e", "grpo", 0, extra=("run.threads=2", "engine.micro_batch_tokens=64")),
        write_run(tmp_path / "f", "spear-grpo", 1, extra=off),
    ]
    arms = arms_of([load_run(path) for path in runs])
    assert [(arm.label, arm.seeds) for arm in arms] == [
        ("gigpo", [0]),
        ("grpo", [0, 1]),
        ("spear-grpo [algorithm.bonus.mode=cosine]", [0]),
        ("spear-grpo [algorithm.bonus.mode=none]", [0, 1]),
    ]
    assert [(pair.arm, pair.base) for pair in pairs_of(arms)] == [
        (arms[2].label, "grpo"),
        (arms[3].label, "grpo"),
        (arms[3].label, arms[2].label),
        ("gigpo", "grpo"),
    ]


def test_settings_that_only_spear_reads_do_not_part_the_runs_of_a_base(tmp_path):
    runs = [
        write_run(tmp_path / "a", "grpo", 0),
        write_run(tmp_path / "b", "grpo", 1, extra=("algorithm.bonus.steps=3",)),
    ]
    assert [arm.label for arm in arms_of([load_run(path) for path in runs])] == ["grpo"]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"extra": ("rollout.group_size=4",)}, "rollout.group_size is 8 in grpo; 4 in spear-grpo"),
        (
            {"extra": ("task.env=household", "task.options.num_digits=5")},
            "task.env is lookup in grpo; household in spear-grpo",
        ),
        ({"extra": ("algorithm.kl=0.1",)}, "algorithm.kl is 0.0 in grpo; 0.1 in spear-grpo"),
        ({"steps": 12}, "run.steps is 10 in grpo; 12 in spear-grpo"),
        ({"seed": 1}, "seeds are 0 in grpo; 1 in spear-grpo"),
    ],
)
def test_arms_that_are_not_like_for_like_are_warned_of(tmp_path, other, says):
    runs = [write_run(tmp_path / "a", "grpo"), write_run(tmp_path / "b", "spear-grpo", **other)]
    assert warnings_of(arms_of([load_run(path) for path in runs])) == [f"not like for like: {says}"]


def test_arms_that_are_like_for_like_bring_no_warning(tmp_path):
    assert compared(two_arms(tmp_path)).warnings == []


def test_success_after_is_the_mean_over_seeds_with_students_interval(tmp_path):
    base, spear = compared(two_arms(tmp_path)).arms
    half = 4.302653 * 0.1 / math.sqrt(3)
    after = base.success_after
    assert (after.value, after.low, after.high) == pytest.approx((0.5, 0.5 - half, 0.5 + half))
    assert after.method == "Student t, 3 seeds"
    assert spear.success_after.value == pytest.approx(0.6)


def test_an_interval_of_success_ends_where_success_does(tmp_path):
    arm = compared(two_arms(tmp_path, base=(0.0, 1.0), spear=())).arms[0]
    assert (arm.success_after.low, arm.success_after.high) == (0.0, 1.0)


def test_one_seed_has_its_evaluations_wilson_interval_marked_as_such(tmp_path):
    comparison = compared(two_arms(tmp_path, base=(0.4,), spear=()))
    assert "40.0% (20.0% to 60.0% Wilson)" in comparison.markdown()
    assert comparison.pairs == []


def test_the_table_holds_the_numbers_of_the_runs(tmp_path):
    base, spear = compared(two_arms(tmp_path)).cells
    assert base == ["grpo", "3", "10.0%", base[3], "7", "7", "0.300", "1.50", "2.00", "-"]
    assert spear[0] == "spear-grpo"
    assert spear[-1] == "90%"


def test_paired_differences_are_those_of_the_seeds_in_common(tmp_path):
    runs = [*two_arms(tmp_path), write_run(tmp_path / "odd", "spear-grpo", 9, after=1.0)]
    (pair,) = compared(runs).pairs
    differences = (0.1, 0.15, 0.05)
    half = 4.302653 * 0.05 / math.sqrt(3)
    assert pair.seeds == [0, 1, 2]
    assert pair.difference.value == pytest.approx(sum(differences) / 3)
    assert (pair.difference.low, pair.difference.high) == pytest.approx((0.1 - half, 0.1 + half))
    assert pair.per_task.value == pytest.approx(0.1)
    assert (pair.better, pair.worse) == (5, 0)
    assert "no difference shown" in pair.text


def test_a_difference_that_all_seeds_show_clearly_is_called_higher(tmp_path):
    runs = two_arms(tmp_path, base=(0.2, 0.3, 0.25), spear=(0.7, 0.85, 0.75))
    (pair,) = compared(runs).pairs
    assert ": higher." in pair.text


def test_one_seed_in_common_is_too_few_and_leaves_the_tasks(tmp_path):
    (pair,) = compared(two_arms(tmp_path, base=(0.4,), spear=(0.5,))).pairs
    assert pair.difference is None
    assert "too few to say anything" in pair.text
    assert (pair.better, pair.worse, pair.sign_test_p) == (2, 0, 0.5)
    assert pair.per_task.value == pytest.approx(0.1)
    assert pair.per_task.low < 0 < pair.per_task.high


def test_no_seed_in_common_pairs_nothing(tmp_path):
    runs = [write_run(tmp_path / "a", "grpo", 0), write_run(tmp_path / "b", "spear-grpo", 1)]
    (pair,) = compared(runs).pairs
    assert (pair.seeds, pair.difference, pair.per_task) == ([], None, None)
    assert "nothing can be paired" in pair.text


@pytest.mark.parametrize(("base", "spear"), [((0.5, 0.5), (0.75, 0.75)), ((0.4, 0.5, 0.6), (0.5, 0.6, 0.7))])
def test_seeds_that_all_differ_alike_are_not_taken_for_certainty(tmp_path, base, spear):
    (pair,) = compared(two_arms(tmp_path, base=base, spear=spear)).pairs
    assert "says nothing" in pair.text


def test_runs_that_repeat_a_seed_count_as_one_seed(tmp_path):
    runs = [write_run(tmp_path / name, "grpo", 0, after=after) for name, after in (("a", 0.4), ("b", 0.6))]
    comparison = compared([*runs, write_run(tmp_path / "c", "grpo", 1, after=0.7)])
    assert comparison.arms[0].after_by_seed == pytest.approx({0: 0.5, 1: 0.7})
    assert comparison.warnings == ["grpo has several runs of seed 0: they count as one seed, by their mean"]


@settings(quick, max_examples=12)
@given(st.randoms(use_true_random=False))
def test_neither_the_order_nor_the_repetition_of_folders_changes_anything(tmp_path_factory, rng):
    root = tmp_path_factory.getbasetemp() / "order"
    if not root.exists():
        two_arms(root)
        write_run(root / "no_bonus", "spear-grpo", 0, after=0.7, extra=("algorithm.bonus.mode='none'",))
        write_run(root / "gigpo", "gigpo", 1, after=0.35, extra=("rollout.num_tasks=4",))
    runs = sorted(root.iterdir())
    shuffled = rng.sample(runs, len(runs))
    found, expected = (arms_of([load_run(p) for p in paths]) for paths in (shuffled, runs))
    assert [arm.as_dict() for arm in found] == [arm.as_dict() for arm in expected]
    assert pairs_of(found) == pairs_of(expected)
    assert warnings_of(found) == warnings_of(expected)


def test_a_folder_named_twice_counts_once(tmp_path):
    run = write_run(tmp_path / "run")
    assert len(compare([run, tmp_path / "run" / ".." / "run"], tmp_path / "out").arms[0].runs) == 1


@quick
@given(st.lists(st.dictionaries(st.integers(0, 8), st.floats(-5, 5)), max_size=4))
def test_a_curve_has_the_steps_all_runs_have_and_its_band_holds_its_mean(runs):
    found = curve(runs)
    logged = [run for run in runs if run]
    assert found.steps == [s for s in range(9) if logged and all(s in run for run in logged)]
    for low, mean, high in zip(found.low, found.mean, found.high, strict=True):
        assert low - 1e-12 <= mean <= high + 1e-12


def test_the_picture_is_a_png_that_shows_something(tmp_path):
    from matplotlib.image import imread

    compare(two_arms(tmp_path), tmp_path / "out")
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")
    pixels = imread(tmp_path / "out" / "compare.png")
    height, width, _ = pixels.shape
    assert (width, height) > (1000, 600)
    assert 0.005 < (pixels[..., :3].min(axis=2) < 0.9).mean() < 0.5
    for color in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)):
        assert ((pixels[..., :3] * 255).round() == color).all(axis=2).sum() > 100


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'spear-rl\[train\]'"):
        compare([write_run(tmp_path / "run")], tmp_path / "out")


def test_the_numbers_are_also_in_strict_json_and_in_markdown(tmp_path):
    comparison = compare(two_arms(tmp_path), tmp_path / "out")
    numbers = json.loads((tmp_path / "out" / "compare.json").read_text(), parse_constant=pytest.fail)
    assert numbers == json.loads(json.dumps(comparison.as_dict()))
    assert [arm["success_after"]["value"] for arm in numbers["arms"]] == pytest.approx([0.5, 0.6])
    assert numbers["curves"]["replayed"]["spear-grpo"]["mean"][-1] == pytest.approx(28)
    text = (tmp_path / "out" / "compare.md").read_text()
    assert text == comparison.markdown()
    assert "| grpo | 3 | 10.0% |" in text
    assert comparison.pairs[0].text in text


def test_it_prints_itself_on_a_narrow_console_without_losing_a_label_or_a_number(tmp_path):
    from rich.console import Console

    runs = two_arms(tmp_path)
    runs.append(write_run(tmp_path / "off", "spear-grpo", 0, extra=("algorithm.bonus.mode='none'",)))
    page = StringIO()
    Console(file=page, width=80).print(compared(runs))
    shown = page.getvalue()
    assert "…" not in shown
    assert "[algorithm.bonus.mode=none] minus grpo" in " ".join(shown.split())
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_comparing_needs_no_torch():
    code = "import sys, spear_rl.app.compare; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    root = Path(__file__).parents[1] / "src"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(root)}, check=False).returncode == 0


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_many_arms_are_printed_whole_in_as_many_tables_as_it_takes(tmp_path, width):
    from spear_rl.io.terminal import PlainConsole
    from spear_rl.settings.names import ALGORITHM_NAMES

    found = compared([write_run(tmp_path / name, name, after=0.1 + 0.02 * n) for n, name in enumerate(ALGORITHM_NAMES)])
    console = PlainConsole(file=StringIO(), width=width)
    console.print(found)
    text = console.file.getvalue()
    assert "…" not in text
    assert all(len(line) <= width for line in text.splitlines())
    words = text.split()
    for cells in found.cells:
        for cell in cells[1:]:
            assert all(word in words for word in cell.split()), f"{cell} is broken"
