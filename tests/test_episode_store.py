"""Episodes as parquet parts: what is written is what is read, whatever dies, and within the bound on disk."""

from __future__ import annotations

import base64
import json
import math
import random
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spear_rl.app.config import load
from spear_rl.app.show import Selection, Words, episodes_text
from spear_rl.app.train import train_from
from spear_rl.errors import DiskError
from spear_rl.io.episodes import parts as parts_module
from spear_rl.io.episodes.index import Episodes, Filter
from spear_rl.io.episodes.parts import INDEX, MERGED, EpisodeWriter, Part, parts_in, pieces_in, remove_later_steps
from spear_rl.train.episode_files import write_trajectories
from spear_rl.types import Completion, Group, Stop, Trajectory, Turn

HOSTILE = ["<script>alert(1)</script>", "\x1b[31mred", "a\u202eb", "\x00", "é" * 50, "\r\n\u2028", "x" * 100_000, ""]
texts = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=20))
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=6)
turns = st.builds(
    lambda ids, prompt, observation, text, reward, key, tool, invalid, cut, images: Turn(
        prompt,
        Completion(ids, [-0.5 * n for n in range(len(ids))], cut, entropies=None if tool else [0.25 for _ in ids]),
        reward, key, tool, invalid, observation, text,
        images=tuple(images),
    ),
    tokens, tokens, texts, texts, st.floats(-1e300, 1e300), texts, st.booleans(),
    st.sampled_from(["", "no_action"]), st.booleans(), st.lists(st.binary(max_size=9), max_size=2),
)  # fmt: skip
episodes = st.builds(
    lambda turns, stop, bonus, success, last: Trajectory(turns, stop, bonus, success, {"m": 1.5}, last),
    st.lists(turns, max_size=4), st.sampled_from(Stop), st.floats(-1, 1), st.booleans(), texts,
)  # fmt: skip
groups = st.lists(
    st.builds(
        lambda task, played: Group(task, played, info={"family": task[:3]}), texts, st.lists(episodes, max_size=3)
    ),
    max_size=3,
)


def played(step: int, rng: random.Random, *, size: int = 4, length: int = 0) -> list[Group]:
    """Two groups whose conversations grow."""

    def episode() -> Trajectory:
        turns, prompt = [], [1, 2, 3]
        for n in range(rng.randint(1, size)):
            ids = [rng.randrange(50) for _ in range(4)]
            done = Completion(ids, [-rng.random() for _ in ids])
            turns.append(
                Turn(
                    prompt,
                    done,
                    rng.random(),
                    f"s{n}",
                    observation=f"seen {n} at {step}",
                    text=f"go {n}" + rng.randbytes(length).hex(),
                )
            )
            prompt = [*prompt, *ids, rng.randrange(50)]
        return Trajectory(turns, Stop.DONE, success=rng.random() < 0.5)

    return [Group(f"task {step}-{n}", [episode() for _ in range(3)], step, {"family": "ab"[n]}) for n in range(2)]


def written(
    folder: Path, steps: int, *, max_bytes: int = 10**9, every: int = 1, length: int = 0
) -> dict[int, list[Group]]:
    writer, rng, all_groups = EpisodeWriter(folder, max_bytes), random.Random(7), {}
    for step in range(0, steps * every, every):
        all_groups[step] = played(step, rng, length=length)
        writer.write(step, all_groups[step])
    return all_groups


def opened(folder: Path) -> Episodes:
    stored = Episodes(folder)
    stored.refresh()
    return stored


def keys(stored: Episodes) -> list[tuple[int, int]]:
    return [(row["step"], row["episode"]) for row in stored.rows(np.arange(len(stored.table)))]


def everything(groups_of: dict[int, list[Group]]) -> dict[tuple[int, int], Trajectory]:
    return {
        (step, number): t
        for step, groups in groups_of.items()
        for number, t in enumerate(t for group in groups for t in group.trajectories)
    }


def assert_same(found: dict, t: Trajectory) -> None:
    assert [turn["text"] for turn in found["turns"]] == [turn.text for turn in t.turns]
    assert [turn["observation"] for turn in found["turns"]] == [turn.observation for turn in t.turns]
    assert [turn["prompt_ids"] for turn in found["turns"]] == [turn.prompt_ids for turn in t.turns]
    assert [turn["token_ids"] for turn in found["turns"]] == [turn.completion.token_ids for turn in t.turns]
    assert [tuple(turn["images"]) for turn in found["turns"]] == [turn.images for turn in t.turns]
    assert [turn["state_key"] for turn in found["turns"]] == [turn.state_key for turn in t.turns]
    assert [turn["turn_reward"] for turn in found["turns"]] == [turn.reward for turn in t.turns]
    for turn, own in zip(found["turns"], t.turns, strict=True):
        assert turn["logprobs"] == pytest.approx(own.completion.logprobs)
        assert turn["entropies"] == own.completion.entropies
    assert found["last_observation"] == t.last_observation
    assert found["stop"] == str(t.stop)
    assert found["success"] == t.success
    assert found["reward"] == t.reward
    assert found["bonus"] == t.bonus


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(groups)
def test_whatever_is_written_is_read_back(tmp_path_factory, groups):
    folder = tmp_path_factory.mktemp("store")
    all_played = [t for group in groups for t in group.trajectories]
    advantages = [[0.25 * n for n in range(len(t.turns))] for t in all_played]
    dropped = [["overlong" if n else "" for n in range(len(t.turns))] for t in all_played]
    EpisodeWriter(folder, 10**9).write(3, groups, advantages, dropped)
    stored = opened(folder)
    assert keys(stored) == [(3, n) for n in range(len(all_played))]
    assert not stored.faults
    for number, t in enumerate(all_played):
        found = stored.episode(3, number)
        assert_same(found, t)
        assert [turn["turn_advantage"] for turn in found["turns"]] == advantages[number]
        assert [turn["turn_dropped"] for turn in found["turns"]] == dropped[number]
        assert json.loads(found["measures"]) == t.metrics


def test_lone_surrogates_are_kept_as_escapes(tmp_path):
    turn = Turn([1], Completion([2], [-1.0]), observation="a\ud800b", text="\udfff")
    EpisodeWriter(tmp_path, 10**9).write(0, [Group("t\ud800", [Trajectory([turn], Stop.DONE)])])
    found = opened(tmp_path).episode(0, 0)
    assert (found["task"], found["turns"][0]["observation"], found["turns"][0]["text"]) == (
        "t\\ud800",
        "a\\ud800b",
        "\\udfff",
    )


def test_steps_are_merged_and_nothing_is_lost(tmp_path):
    kept = written(tmp_path, 2 * MERGED + 3, every=2)
    assert len(parts_in(tmp_path)) == 2 + 3
    stored = opened(tmp_path)
    assert keys(stored) == sorted(everything(kept))
    for (step, number), t in random.Random(1).sample(sorted(everything(kept).items(), key=lambda x: x[0]), 30):
        assert_same(stored.episode(step, number), t)


def test_the_index_of_a_merged_part_is_what_its_rows_say(tmp_path):
    written(tmp_path, MERGED)
    [part] = parts_in(tmp_path)
    stored = opened(tmp_path)
    assert INDEX in pq.read_metadata(part.path).metadata
    rows = pq.read_table(part.path).replace_schema_metadata()
    pq.write_table(rows, part.path)  # as versions without an index wrote it
    assert INDEX not in pq.read_metadata(part.path).metadata
    plain = opened(tmp_path)
    assert plain.table.to_pylist() == stored.table.to_pylist() != []
    for junk in (b"%%%", b"AAAA", base64.b64encode(b"PAR1 no parquet PAR1")):
        with pq.ParquetWriter(part.path, rows.schema) as writer:
            writer.add_key_value_metadata({INDEX: junk})
        assert opened(tmp_path).faults


def test_a_reader_sees_every_step_as_it_is_written_and_reads_no_part_twice(tmp_path, monkeypatch):
    stored, writer, rng, reads = opened(tmp_path), EpisodeWriter(tmp_path, 10**9), random.Random(0), []
    real = pq.ParquetFile
    for step in range(MERGED + 2):
        writer.write(step, played(step, rng))
        monkeypatch.setattr(
            pq, "ParquetFile", lambda path, **options: (reads.append(str(path)), real(path, **options))[1]
        )
        assert stored.refresh()
        assert not stored.refresh()
        monkeypatch.undo()
        assert max(stored.numbers("step")) == step
    assert len(reads) == len(set(reads))


@pytest.mark.parametrize("when", ["after the merged part", "while it is written"])
def test_a_kill_during_a_merge_loses_and_doubles_nothing(tmp_path, monkeypatch, when):
    kept = written(tmp_path, MERGED - 1)
    writer, rng = EpisodeWriter(tmp_path, 10**9), random.Random(3)
    kept[MERGED - 1] = played(MERGED - 1, rng)

    def killed(*_args, **_kwargs):
        raise KeyboardInterrupt

    if when == "after the merged part":
        monkeypatch.setattr(parts_module, "_remove", killed)
    else:
        monkeypatch.setattr(parts_module, "flush", killed)
    with pytest.raises(KeyboardInterrupt):
        writer.write(MERGED - 1, kept[MERGED - 1])
    monkeypatch.undo()
    assert keys(opened(tmp_path)) == sorted(everything(kept))
    kept[MERGED] = played(MERGED, rng)
    writer.write(MERGED, kept[MERGED])
    assert keys(opened(tmp_path)) == sorted(everything(kept))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path):
    (tmp_path / ".steps_000000_000000.parquet.part").symlink_to("/dev/full")
    with pytest.raises(DiskError, match=r"steps_000000_000000.parquet cannot be written: .*No space left on device"):
        EpisodeWriter(tmp_path, 10**9).write(0, played(0, random.Random(0)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("step", [0, 1, MERGED - 1, MERGED, MERGED + 2, 2 * MERGED + 9])
def test_a_resume_removes_what_comes_after_its_checkpoint(tmp_path, step):
    kept = everything(written(tmp_path, MERGED + 5))
    (tmp_path / ".steps_000099_000099.parquet.part").write_bytes(b"half")
    (tmp_path / "mine.txt").write_text("kept")
    remove_later_steps(tmp_path, step)
    stored = opened(tmp_path)
    assert keys(stored) == sorted(key for key in kept if key[0] < step)
    assert {path.suffix for path in tmp_path.iterdir()} <= {".parquet", ".txt"}
    assert (tmp_path / "mine.txt").exists()
    for key in keys(stored)[-3:]:
        assert_same(stored.episode(*key), kept[key])


def test_the_bound_on_disk_holds_and_texts_go_before_episodes(tmp_path):
    whole = tmp_path / "whole"
    kept = everything(written(whole, 3 * MERGED, length=1000))
    size = sum(path.stat().st_size for path in whole.iterdir())
    bounded = tmp_path / "bounded"
    written(bounded, 3 * MERGED, max_bytes=int(size * 0.6), length=1000)
    assert sum(path.stat().st_size for path in bounded.iterdir()) <= size * 0.6
    stored = opened(bounded)
    assert keys(stored) == sorted(kept), "every episode is still in the table"
    assert not stored.episode(0, 0)["has_texts"]
    assert stored.episode(3 * MERGED - 1, 0)["has_texts"]
    tight = tmp_path / "tight"
    written(tight, 7, max_bytes=1)
    assert {step for step, _ in keys(opened(tight))} == {6}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 10_000), st.integers(0, 2), st.binary(min_size=1, max_size=40))
def test_a_damaged_part_is_named_and_the_rest_is_read(tmp_path, at, how, junk):
    folder = tmp_path / f"{at}-{how}-{junk.hex()}"
    written(folder, 3)
    path = Part.of(folder, 1, 1).path
    content = path.read_bytes()
    place = at % len(content)
    damaged = [content[:place], junk, content[:place] + junk + content[place + len(junk) :]][how]
    path.write_bytes(damaged)
    stored = opened(folder)
    assert {0, 2} <= {step for step, _ in keys(stored)}
    for key in keys(stored):
        stored.episode(*key)
    if how < 2:
        assert any("steps_000001_000001.parquet" in fault for fault in stored.faults)
    shutil.rmtree(folder)


def test_a_damaged_part_is_not_merged_away(tmp_path):
    writer, rng = EpisodeWriter(tmp_path, 10**9), random.Random(0)
    for step in range(MERGED + 4):
        writer.write(step, played(step, rng))
        if step == 5:
            Part.of(tmp_path, 5, 5).path.write_bytes(b"damaged")
    stored = opened(tmp_path)
    assert {step for step, _ in keys(stored)} == set(range(MERGED + 4)) - {5}
    assert len(stored.faults) == 1
    assert "steps_000005_000005" in stored.faults[0]
    assert len(parts_in(tmp_path)) < 9


def test_filters_and_orders_are_those_of_a_plain_loop(tmp_path):
    kept = written(tmp_path, MERGED + 4)
    stored = opened(tmp_path)
    plain = stored.rows(np.arange(len(stored.table)))
    rng = random.Random(5)
    for _ in range(200):
        low = rng.randrange(40)
        wanted = Filter(
            step=rng.choice([None, (low, low + 7)]),
            task=rng.choice(["", "K 1", "nothing"]),
            stop=rng.choice(["", "done", "x"]),
            family=rng.choice(["", "a"]),
            success=rng.choice([None, True, False]),
            dropped=rng.choice(["", "none", "any"]),
            group=rng.choice([None, 1]),
        )
        by, descending = rng.choice(["reward", "step", "task", "turns", "advantage"]), rng.random() < 0.5
        rows = stored.rows(stored.ordered(stored.where(wanted), by, descending=descending))
        expected = [
            row
            for row in plain
            if (wanted.step is None or wanted.step[0] <= row["step"] <= wanted.step[1])
            and wanted.task.casefold() in row["task"].casefold()
            and wanted.stop in ("", row["stop"])
            and wanted.family in ("", row["family"])
            and wanted.success in (None, row["success"])
            and (wanted.dropped in ("", "none") or bool(row["dropped"]))
            and wanted.group in (None, row["group"])
        ]
        if by != "advantage":  # none here has any
            expected.sort(key=lambda row: row[by], reverse=descending)
        assert rows == expected
    assert len(plain) == len(everything(kept))


def test_json_lines_of_earlier_versions_open_beside_parts(tmp_path):
    old, rng = played(0, random.Random(1)), random.Random(2)
    write_trajectories(tmp_path / "step_000000.jsonl", old, None)
    with (tmp_path / "step_000000.jsonl").open("a") as file:
        file.write('{"turns": "none"}\n[1]\n{"cut')
    EpisodeWriter(tmp_path, 10**9).write(1, played(1, rng))
    stored = opened(tmp_path)
    count = len(everything({0: old}))
    assert keys(stored)[:count] == [(0, n) for n in range(count)]
    assert "lines 7, 8, 9" in stored.faults[0]
    for (_, number), t in everything({0: old}).items():
        found = stored.episode(0, number)
        assert [turn["text"] for turn in found["turns"]] == [turn.text for turn in t.turns]
        assert found["reward"] == t.reward
        assert found["last_observation"] == t.last_observation


def test_texts_of_tokens_are_written_once_and_survive_a_resume(tmp_path):
    asked = []

    def pieces(ids: list[int]) -> list[str]:
        asked.extend(ids)
        return [f"<{number}>" for number in ids]

    rng = random.Random(0)
    for start in (0, 3):  # the second is a resume
        writer = EpisodeWriter(tmp_path, 10**9, pieces)
        for step in range(start, start + 3):
            writer.write(step, played(step, rng))
        remove_later_steps(tmp_path, start + 3)
    assert len(asked) == len(set(asked))
    used = {
        i
        for k in keys(opened(tmp_path))
        for t in opened(tmp_path).episode(*k)["turns"]
        for i in [*t["token_ids"], *t["prompt_ids"]]
    }
    assert pieces_in(tmp_path / "token_texts.jsonl") == {number: f"<{number}>" for number in used}


SMALL = [
    "algorithm.bonus.steps=6",
    "run.threads=1",
    "run.checkpoint_every=2",
    "sft.episodes=160",
    "eval.tasks=2",
    "algorithm.imitation.warm_steps=2",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """The same run with both formats, and one in parquet that stopped at step 3 and went on."""
    found = {}
    for name in ("parquet", "jsonl"):
        found[name] = tmp_path_factory.mktemp("runs") / name
        train_from(load("lookup", [f"run.dir={found[name]}", *SMALL, "run.steps=6", f"run.trajectories_format={name}"]))
    found["resumed"] = tmp_path_factory.mktemp("runs") / "resumed"
    for extra in (["run.steps=3"], ["run.steps=6", "run.resume=true"]):
        train_from(load("lookup", [f"run.dir={found['resumed']}", *SMALL, *extra, "algorithm.imitation.warm_steps=2"]))
    return found


def shown(run: Path, **options) -> list[dict]:
    given = {"failed": False, "solved": False, "replayed": False, "evaluated": False, "task": "", "step": ""}
    given |= {"family": "", "split": "", "limit": 10_000}
    return [
        json.loads(line)
        for line in episodes_text(run, Selection.of(**given | options), Words(), as_json=True).splitlines()
    ]


@pytest.mark.parametrize("options", [{}, {"failed": True}, {"replayed": True}, {"step": "2-4"}], ids=str)
def test_show_finds_the_same_episodes_in_both_formats(runs, options):
    def plain(episodes: list[dict]) -> list[dict]:
        return [
            {key: value for key, value in episode.items() if key not in ("text", "episode", "bonus")}
            for episode in episodes
        ]

    one, other = (plain(shown(runs[name], **options)) for name in ("parquet", "jsonl"))
    assert len(one) > 3
    if "replayed" in options:  # as played, with the bonus; JSON lines have what replay admitted them by
        for turn in (turn for episode in one + other for turn in episode["turns"]):
            turn.pop("advantage")
    assert one == other


def test_every_step_of_a_run_is_recorded_with_its_tokens(runs):
    stored = opened(runs["parquet"] / "trajectories")
    assert set(stored.numbers("step")) == set(range(6))
    pieces = stored.pieces()
    for key in keys(stored)[::7]:
        for turn in stored.episode(*key)["turns"]:
            assert len(turn["token_ids"]) == len(turn["logprobs"]) > 0
            assert all(logprob <= 1e-6 and math.isfinite(logprob) for logprob in turn["logprobs"])
            assert len(turn["entropies"]) == len(turn["token_ids"])
            assert all(-1e-6 <= entropy <= math.log(len(pieces) + 1000) for entropy in turn["entropies"])
            assert turn["text"].strip() in "".join(pieces[number] for number in turn["token_ids"])


def test_a_resumed_run_records_what_one_that_never_stopped_does(runs):
    one, other = (opened(runs[name] / "trajectories") for name in ("parquet", "resumed"))
    assert keys(one) == keys(other)
    for key in keys(one)[::11]:
        assert one.episode(*key) == other.episode(*key)


@pytest.mark.parametrize("name", ["parquet", "resumed"])
def test_the_buffers_log_says_what_replay_could_draw(runs, name):
    changes = [json.loads(line) for line in (runs[name] / "buffer.jsonl").read_text().splitlines()]
    draws = [json.loads(line) for line in (runs[name] / "draws.jsonl").read_text().splitlines()]
    metrics = [json.loads(line) for line in (runs[name] / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in changes] == sorted({row["step"] for row in changes})
    stored: dict[int, set[str]] = {}
    inside: set[str] = set()
    for row in changes:
        assert not inside & set(row["entered"])
        assert set(row["left"]) <= inside
        assert all(entry.startswith(f"{row['step']}/") for entry in row["entered"])
        inside = (inside | set(row["entered"])) - set(row["left"])
        stored[row["step"]] = inside
    assert draws
    for row in draws:
        assert {draw["episode"] for draw in row["draws"]} <= stored[row["step"] - 1]
    assert metrics[-1]["replay/buffer_size"] <= len(stored[4])


def test_the_buffers_log_is_the_same_after_a_resume(runs):
    assert (runs["parquet"] / "buffer.jsonl").read_text() == (runs["resumed"] / "buffer.jsonl").read_text()
