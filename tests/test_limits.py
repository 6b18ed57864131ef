"""Every setting and every option of an environment times absurd values: accepted within its range, or one sentence."""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import resource
import signal
import traceback
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from datetime import date, time
from typing import Annotated, Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spear_rl.app.build.rollout import tasks_of
from spear_rl.app.config import Config, check, load, sections, to_toml, value_of
from spear_rl.envs import ENVIRONMENTS
from spear_rl.errors import ConfigError, UserError
from spear_rl.settings.fields import choices, literal
from spear_rl.settings.names import ALGORITHM_NAMES
from spear_rl.settings.ranges import FilePath, Length, OneOf, Range, checked, described, has_checked_options


def settable() -> Iterator[tuple[str, Any]]:
    """(key, annotation) of every field that is no section."""
    for path, section in sections(Config()):
        hints = typing.get_type_hints(type(section), include_extras=True)
        yield from ((f"{path}.{f.name}", hints[f.name]) for f in fields(section) if not is_dataclass(hints[f.name]))


def parts(hint: Any) -> tuple[Any, list[Any]]:
    """The type under an annotation, None left out, and its limits."""
    if typing.get_origin(hint) is Annotated:
        kind, limits = parts(hint.__origin__)
        return kind, [*hint.__metadata__, *limits]
    if type(None) in typing.get_args(hint):
        return parts(next(a for a in typing.get_args(hint) if a is not type(None)))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):  # true, false, or a word
        return parts(typing.get_args(hint)[0])
    return hint, []


FIELDS = dict(settable())
NUMBERS = {key: hint for key, hint in FIELDS.items() if parts(hint)[0] in (int, float)}
LITERALS = {key: hint for key, hint in FIELDS.items() if typing.get_origin(parts(hint)[0]) is Literal}
OPTIONS = {
    f"{env}.{name}": parameter.annotation
    for env, tasks in ENVIRONMENTS.items()
    for name, parameter in inspect.signature(tasks).parameters.items()
    if name != "split"
}
TEXTS = [
    *("-1", "0", "1", "2", "-1000000000", "1000000000", "1000000000000000000", "-1e9", "1e9", "1e18", "1e3", "10.0"),
    *("0.5", "1e-320", "nan", "-nan", "inf", "-inf", "", '""', "true", "True", "[]", "[1, 'a']", "{a = 1}"),
    *("2026-11-15", "10:20:30", "2026-11-15T10:20:30Z", "no-such-choice", "x" * 100_000, "/" * 5000, "\udcff"),
    *("9" * 5000, "0x" + "f" * 5000, "[" * 5000, "none", "0x10", "007", "1\nrun.steps = 3", "a\tb", "é☃"),
]
"""As a command line gives them."""
VALUES = [
    *(-1, 0, 1, -1e9, 10**9, 10**18, 10**5000, -(10**400), 0.5, math.nan, math.inf, -math.inf, "", "x" * 100_000),
    *([], [1], ["\0"], {}, {"a": 1}, None, True, False, date(2026, 11, 15), time(1), b"x", object(), Config(), "\0"),
]
"""As a Python caller gives them."""


def is_allowed(value: Any, hint: Any) -> bool:
    """By the annotation's figures alone, without the code that is tested."""
    kind, limits = parts(hint)
    if value is None:
        return type(None) in typing.get_args(hint)
    if Literal in map(typing.get_origin, typing.get_args(hint)) and isinstance(value, str):
        return any(value in typing.get_args(a) for a in typing.get_args(hint) if typing.get_origin(a) is Literal)
    if typing.get_origin(kind) is Literal:
        return value in typing.get_args(kind)
    if typing.get_origin(kind) in (list, dict):
        return isinstance(value, typing.get_origin(kind))
    assert type(value) is kind
    for limit in limits:
        if isinstance(limit, Range):
            above = value > limit.low or (value == limit.low and limit.ends[0] == "[")
            below = value < limit.high or (value == limit.high and limit.ends[1] == "]")
            return math.isfinite(value) and ((above and below) or bool(limit.zero and not value))
    return True


def assert_is_a_sentence(error: UserError, key: str, hint: Any) -> None:
    text = str(error)
    assert key.removesuffix("_") in text, text  # a field `from_` is the setting `from`
    assert "\n" not in text
    assert len(text) < 1500
    text.encode()
    kind, limits = parts(hint)
    if kind in (int, float) and " takes " not in text and "they are" not in text and "has no value" not in text:
        assert str(limits[0]) in text or "0 for the likeliest token" in text


# Every field


@pytest.mark.parametrize("key", FIELDS)
def test_every_number_has_a_range_and_every_text_a_length(key):
    kind, limits = parts(FIELDS[key])
    if kind in (int, float):
        [limit] = limits
        assert isinstance(limit, Range)
        assert limit.low < limit.high < math.inf
        assert limit.low > -math.inf
    elif kind is str:
        assert any(isinstance(limit, Length | FilePath) for limit in limits)
    elif typing.get_origin(kind) is list:
        assert any(isinstance(limit, Length) for limit in limits)
    else:
        assert kind is bool or typing.get_origin(kind) in (Literal, dict)


@pytest.mark.parametrize("key", LITERALS)
def test_every_choice_has_a_line_of_help_that_the_page_of_settings_and_the_error_show(key):
    path, name = key.rsplit(".", 1)
    helps = choices(type(value_of(Config(), path)), name)
    assert list(helps) == list(typing.get_args(parts(FIELDS[key])[0]))
    assert all(helps.values())
    page = to_toml(Config(), comments=True)
    with pytest.raises(ConfigError) as error:
        load(None, [f"{key}=no-such-choice"])
    for choice, text in helps.items():
        assert f"#   {choice}: {text}\n" in page
        assert f"{choice} ({text})" in str(error.value)


def test_the_page_of_settings_shows_every_range():
    page = to_toml(Config(), comments=True)
    for key, hint in NUMBERS.items():
        name = key.rsplit(".", 1)[1]
        assert re.search(rf"\({re.escape(described(hint))}\)\n(#   .*\n)*(# )?{name} =", page), key


@pytest.mark.parametrize("key", FIELDS)
def test_an_absurd_text_is_accepted_within_its_range_or_refused_in_one_sentence(key):
    for text in TEXTS:
        try:
            config = load(None, [f"{key}={text}"])
        except ConfigError as error:
            assert_is_a_sentence(error, key, FIELDS[key])
        else:
            assert is_allowed(value_of(config, key), FIELDS[key]), text


@pytest.mark.parametrize("key", FIELDS)
def test_a_config_made_by_hand_is_held_to_the_same(key):
    path, name = key.rsplit(".", 1)
    for value in VALUES:
        config = Config()
        setattr(value_of(config, path), name, value)
        try:
            check(config)
        except ConfigError as error:
            assert_is_a_sentence(error, key, FIELDS[key])
        else:
            assert is_allowed(value_of(config, key), FIELDS[key]), value


@pytest.mark.parametrize("key", NUMBERS)
def test_just_outside_of_its_range_a_number_is_refused_with_the_range_and_the_value(key):
    kind, [limit] = parts(NUMBERS[key])
    low = limit.low if limit.ends[0] == "(" else limit.low - 1 if kind is int else math.nextafter(limit.low, -math.inf)
    high = (
        limit.high if limit.ends[1] == ")" else limit.high + 1 if kind is int else math.nextafter(limit.high, math.inf)
    )
    for value in (kind(low), kind(high)):
        with pytest.raises(ConfigError) as error:
            load(None, [f"{key}={value!r}"])
        assert str(error.value) == f"{key} must be {limit} (it is {value!r})"


# How a value is written


@pytest.mark.parametrize(
    "text", ["2026-11-15", "10:20:30", "007", "1e3", "0x10", "nan", "inf", "True", "true", "1_000", "[1]", "{a = 1}"]
)
def test_a_text_field_gets_what_was_typed(text):
    assert load(None, [f"run.dir={text}"]).run.dir == text


def test_a_text_may_be_quoted_and_a_broken_quote_is_only_a_text():
    assert load(None, ['run.dir="a \\u0062"']).run.dir == "a b"
    assert load(None, ["run.dir='x'"]).run.dir == "x"
    assert load(None, ["run.dir='x"]).run.dir == "'x"
    assert load(None, ["run.dir='a' + 'b'"]).run.dir == "'a' + 'b'"
    assert load(None, ["run.dir=a=b"]).run.dir == "a=b"
    assert load(None, ["task.python="]).task.python == ""


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("run.steps=1e3", "run.steps takes a whole number; got 1000.0: write 1000"),
        ("run.steps=10.0", "run.steps takes a whole number; got 10.0: write 10"),
        ("run.steps=1.5", "run.steps takes a whole number; got 1.5"),
        ("run.steps=", "run.steps has no value: write run.steps=value"),
        ("run.dir=", "run.dir must not be empty"),
        ("=3", "'=3' is no setting: write section.key=value, e.g. run.steps=50"),
        ("run.steps", "'run.steps' is no setting: write section.key=value, e.g. run.steps=50"),
        (".run.steps=3", "'.run.steps=3' is no setting: write section.key=value, e.g. run.steps=50"),
        ("run.steps.=3", "'run.steps.=3' is no setting: write section.key=value, e.g. run.steps=50"),
        ("run..steps=3", "'run..steps=3' is no setting: write section.key=value, e.g. run.steps=50"),
        ("runs.steps=3", "unknown setting runs.steps; did you mean run.steps?"),
        ("run.stepz=3", "unknown setting run.stepz; did you mean run.steps?"),
        ("run.steps.more=3", "run.steps takes a whole number; got {'more': 3}"),
        ("steps=3", "unknown setting steps"),
        ("task.options.x=nan", "task.options.x takes a text, a finite number of at most 64 bits"),
        ("eval.temperature=1e-9", "eval.temperature must be 0 for the likeliest token, or 0.001 or more"),
        ("algorithm.covariance.low=60", "low must be below algorithm.covariance.high (they are 60.0 and 60.0)"),
        ("rollout.stop=['']", "rollout.stop must not be empty"),
    ],
)
def test_a_setting_that_is_none_is_one_sentence(setting, sentence):
    with pytest.raises(ConfigError) as error:
        load(None, [setting])
    assert sentence in str(error.value)


def test_settings_that_must_agree_are_named_together():
    for overrides, words in {
        ("eval.every=5", "eval.tasks=0"): "eval.every=5 with eval.tasks=0",
        ("rollout.num_tasks=8192", "rollout.group_size=9"): "must be at most 65,536 episodes (it is 73,728)",
    }.items():
        with pytest.raises(ConfigError) as error:
            load(None, overrides)
        assert words in str(error.value)


def test_of_two_settings_for_one_key_the_later_one_counts():
    assert load(None, ["run.steps=1", "run.steps=2"]).run.steps == 2


@pytest.mark.parametrize(
    "content",
    [
        b"[run]\nsteps = 1\nsteps = 2\n",
        b"[run]\n[run]\n",
        b"[run]\nsteps = " + b"9" * 5000,
        b"x = " + b"[" * 100_000,
        b"\xff\xfe",
        b"run = 3\n",
        b"[run]\nsteps = 1979-05-27\n",
        b"[task.options]\na = inf\n",
        b"[task.options]\na = " + b"[" * 50 + b"]" * 50 + b"\n",
        b"[runn]\nsteps = 1\n",
        b'[run]\ndir = "\\u0000"\n',
    ],
)
def test_a_strange_file_is_one_sentence(tmp_path, content):
    (tmp_path / "x.toml").write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load(str(tmp_path / "x.toml"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("source", ["x" * 300, "/" + "y" * 5000, "a\0b", "\udcff", ".", "quickstrat"])
def test_a_source_that_is_no_file_is_one_sentence(source):
    with pytest.raises(ConfigError, match="neither a preset nor a file"):
        load(source)


@given(st.text())
def test_any_text_can_be_a_value(text):
    assert isinstance(literal(text, is_text=True), str)
    literal(text)


# There and back


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    kind, limits = parts(hint)
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return st.one_of(st.none() if a is type(None) else values_of(a) for a in typing.get_args(hint))
    if typing.get_origin(kind) is Literal:
        return st.sampled_from(typing.get_args(kind))
    if typing.get_origin(kind) is list:
        [entry] = typing.get_args(kind)
        names = next((limit.names for limit in parts(entry)[1] if isinstance(limit, OneOf)), None)
        return st.lists(st.sampled_from(sorted(names)) if names else TEXT.filter(bool), max_size=4)
    if typing.get_origin(kind) is dict:
        return st.dictionaries(TEXT, PLAIN, max_size=4)
    if kind is str:
        return TEXT.map(lambda text: re.sub("[\x00-\x1f\x7f]", "", text)).filter(bool)
    if kind is bool:
        return st.booleans()
    [limit] = limits
    if kind is int:
        return st.integers(limit.low, limit.high)
    return st.floats(
        limit.low, limit.high, exclude_min=limit.ends[0] == "(", exclude_max=limit.ends[1] == ")", allow_nan=False
    )


TEXT = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=40)
PLAIN = st.recursive(
    st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
    | st.sampled_from(["\x7f", "\x1b[0m", '"', "'''", "\\", "\r\n", "\u2028", "1e-7"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.fixed_dictionaries({key: values_of(hint) for key, hint in FIELDS.items()}), st.booleans())
def test_any_valid_config_survives_the_round_trip(tmp_path_factory, drawn, comments):
    config = Config()
    for key, value in drawn.items():
        path, name = key.rsplit(".", 1)
        setattr(value_of(config, path), name, value)
    config.eval.every = config.eval.every if config.eval.tasks else 0
    config.eval.temperature = config.eval.temperature if config.eval.temperature >= 0.001 else 0.0
    config.rollout.group_size = min(config.rollout.group_size, 8)
    config.optim.num_minibatches = 1 if config.optim.minibatch_rows else config.optim.num_minibatches
    config.algorithm.covariance.high = config.algorithm.covariance.low + 1
    config.algorithm.name = ALGORITHM_NAMES[config.run.seed % len(ALGORITHM_NAMES)]
    if config.algorithm.covariance.high > 1_000_000:
        config.algorithm.covariance.low, config.algorithm.covariance.high = 0.0, 1e-7
    for name, number in (("steps", config.algorithm.bonus), ("warm_steps", config.algorithm.imitation)):
        setattr(number, name, getattr(number, name) or 1)
    config.algorithm.max_length = config.algorithm.max_length or 1
    config.rollout.restart_share = 0.0 if config.task.agent else config.rollout.restart_share
    path = tmp_path_factory.mktemp("round") / "config.toml"
    path.write_text(to_toml(config, comments=comments), "utf-8", newline="\n")
    assert load(str(path)) == config


# Options of environments


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """No data and no cache of the machine's own."""
    for variable in ("ALFWORLD_DATA", "BOXOBAN_DATA", "WEBSHOP_DATA", "SPEAR_RL_MATH_DATA", "SPEAR_RL_CACHE"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    problem = {"question": "2 + 3", "answer": "5", "split": "validation"}
    (tmp_path / "problems.jsonl").write_text(json.dumps(problem), "utf-8")


NEEDED = {"webshop": ["level=tiny"], "tools": ["problems=problems.jsonl", "tools=sandbox"]}
"""Options without which an environment has no task, or takes long to find them."""


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_an_environment_says_what_it_may_be(option):
    tasks = ENVIRONMENTS[option.split(".")[0]]
    kind, limits = parts(typing.get_type_hints(tasks, include_extras=True)[option.split(".")[1]])
    if kind in (int, float):
        assert [type(limit) for limit in limits] == [Range]
    elif kind is str:
        assert any(isinstance(limit, OneOf | FilePath | Length) for limit in limits)


@pytest.mark.parametrize("option", OPTIONS)
def test_an_absurd_option_is_accepted_within_its_range_or_refused_in_one_sentence(option, nowhere):
    env, name = option.split(".")
    hint = typing.get_type_hints(ENVIRONMENTS[env], include_extras=True)[name]
    kind, limits = parts(hint)
    if env == "sokoban" and kind is int:
        texts = [text for text in TEXTS if text not in ("1", "2", "0x10")]  # other shapes are searched for a while
    elif option == "webshop.num_products":
        texts = [text for text in TEXTS if text not in ("1", "2", "0x10")]
    else:
        texts = TEXTS
    for text in [t for t in texts if t]:
        needed = [f"task.options.{words}" for words in NEEDED.get(env, ()) if not words.startswith(f"{name}=")]
        setting = [f"task.env={env}", *needed]
        try:
            config = load(None, [*setting, f"task.options.{name}={text}"])
            tasks_of(config, "validation", count=1)
        except UserError as error:
            sentence = str(error)
            assert "\n" not in sentence
            assert len(sentence) < 1500
            is_of_no_option = env == "alfworld" or "leave no task" in sentence or "pip install" in sentence
            assert f"task.options.{name}" in sentence or is_of_no_option or name in sentence, sentence
        else:
            value = config.task.options[name]
            for limit in limits:
                assert not isinstance(limit, Range) or value == "none" or limit.low <= value <= limit.high
            assert isinstance(value, str | int | float | list)


def test_a_function_holds_its_callers_to_its_annotations():
    @has_checked_options
    def made(split: str = "train", *, count: Annotated[int, Range(1, 3)] = 1, names: typing.Sequence[str] = ()) -> str:
        return f"{split} {count} {list(names)}"

    assert made() == "train 1 []"
    assert made("test", count=3, names=("a",)) == "test 3 ['a']"
    for options, words in (({"count": 4}, "count must be 1 or more"), ({"names": "abc"}, "names takes a list")):
        with pytest.raises(ValueError, match=words) as error:
            made(**options)
        assert isinstance(error.value, ConfigError)
    with pytest.raises(TypeError):
        made(other=1)


@given(st.floats(), st.floats(-1e9, 1e9), st.floats(0, 1e9), st.sampled_from(["[]", "()", "[)", "(]"]))
def test_a_range_holds_what_lies_between_its_ends_and_nothing_else(value, low, width, ends):
    high = low + width
    is_in = (value >= low if ends[0] == "[" else value > low) and (value <= high if ends[1] == "]" else value < high)
    hint = Annotated[float, Range(low, high, ends)]
    if is_in:
        assert checked(value, hint, "x") == value
    else:
        with pytest.raises(ConfigError):
            checked(value, hint, "x")


def test_levels_that_take_too_long_to_find_are_given_up_in_one_sentence(monkeypatch):
    monkeypatch.setattr("spear_rl.envs.sokoban.panel.MAX_SECONDS", 0.0)
    config = load(None, ["task.env=sokoban", "task.options.width=40", "task.options.num_boxes=12"])
    with pytest.raises(ConfigError, match=r"^task\.options\.width: levels of 40 x 40 with 12 boxes .* take too long"):
        tasks_of(config, "train")


# The command line's own options


@pytest.mark.parametrize(
    "arguments",
    [
        *(("eval", "expert", "--env", "lookup", "--tasks", n) for n in ("-1", "1000000000")),
        *(("eval", "expert", "--env", "lookup", "--episodes", n) for n in ("-1", "0", "1000000000")),
        *(("eval", "expert", "--env", "lookup", "--samples", n) for n in ("-3", "1000000000")),
        *(("eval", "expert", "--env", "lookup", "--temperature", n) for n in ("-1", "nan", "inf", "1e9")),
        *(("eval", "expert", "--env", "lookup", "--seed", n) for n in ("-1", "1000000000000000000")),
        *(("eval", "http://127.0.0.1:9/v1", "--parallel", n) for n in ("-1", "0", "1000000000")),
        *(("eval", "http://127.0.0.1:9/v1", "--timeout", n) for n in ("-1", "0", "nan", "inf", "1e9")),
        *(("check-env", "lookup", "--tasks", n) for n in ("-1", "0", "1000000000")),
        ("check-env", "lookup", "num_digits=11"),
        ("check-env", "lookup", "num_digits=ten"),
        *(("show", "config", "--episodes", n) for n in ("-1", "1000000000")),
        *(("shop", "--port", n) for n in ("-1", "65536", "1000000000")),
        ("shop", "num_products=-1"),
        ("shop", "seed=[1]"),
        ("show", "x" * 5000),
        ("eval", "x" * 5000, "--env", "lookup"),
        ("train", "x" * 5000),
        ("train", "lookup", "=3"),
        ("train", "lookup", f"run.dir={'b/' * 1500}"),
    ],
    ids=lambda arguments: " ".join(arguments)[:60],
)
def test_an_absurd_option_of_a_command_is_one_sentence_and_exit_code_2(spear, arguments):
    code, text = spear(*arguments)
    assert code == 2, text
    assert text.startswith("error: ")
    assert len(text.strip().splitlines()) == 1


# What is accepted runs


@dataclass
class Ended:
    """How a run of one or two steps ended in a process of its own."""

    how: str
    """done, a sentence of a UserError, or a traceback."""
    metrics: list[dict[str, float]]
    evaluations: list[dict[str, Any]]


class EnoughError(Exception):
    """Two steps, or forty updates of the cold start, show what there is to be seen."""


def ended(run_dir: Any, overrides: list[str], *, seconds: int = 300, gibibytes: int = 12) -> Ended:
    """Train in a fork, which has torch already, within limits of time and memory."""
    (reading, writing), pid = os.pipe(), os.fork()
    if pid:
        os.close(writing)
        with open(reading, "rb") as pipe:
            said = pipe.read()
        _, status = os.waitpid(pid, 0)
        assert said, f"{overrides}: killed by signal {os.waitstatus_to_exitcode(status)}: too long, or too much memory"
        return Ended(**json.loads(said))
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        resource.setrlimit(resource.RLIMIT_AS, (gibibytes << 30, gibibytes << 30))
        os.write(writing, json.dumps(_trained(run_dir, overrides).__dict__).encode())
    finally:
        os._exit(0)


def _trained(run_dir: Any, overrides: list[str]) -> Ended:
    from spear_rl.app.train import train_from
    from spear_rl.train.callbacks import scalars

    metrics: list[dict[str, float]] = []
    evaluations: list[dict[str, Any]] = []
    updates = []

    def watch(event: Any) -> None:
        if event.kind == "eval":
            evaluations.append({name: event.metrics[name] for name in ("turns", "episodes")})
        elif event.kind == "step":
            metrics.append(scalars(event))
        elif event.kind == "sft":
            updates.append(event.metrics)
        if len(metrics) == 2 or len(updates) == 40:
            raise EnoughError

    how = "done"
    try:
        train_from(load("lookup", [f"run.dir={run_dir}", *overrides]), [watch])
    except EnoughError:
        pass
    except UserError as error:
        how = str(error)
    except BaseException:
        how = traceback.format_exc()
    return Ended(how, metrics, evaluations)


SMALL = [
    *("run.steps=2", "run.threads=1", "engine.device=cpu", "task.options.num_digits=2", "rollout.num_tasks=4"),
    *("rollout.group_size=4", "sft.episodes=48", "sft.epochs=1", "eval.tasks=4", "algorithm.imitation.warm_steps=1"),
    *("algorithm.imitation.fraction=1", "algorithm.covariance.low=0", "algorithm.covariance.on_policy=clip"),
]
WITH = {
    "algorithm.": ["algorithm.name=spear-dr-bot-gigpo"],
    "algorithm.entropy_bonus": ["algorithm.name=spear-gigpo"],
    "algorithm.covariance.beta": ["algorithm.covariance.on_policy=kl", "algorithm.covariance.replay=kl"],
    "rollout.step_timeout": ["rollout.workers=1"],
    "engine.lora": [],
    "eval.samples": ["eval.tasks=1", "eval.max_turns=1", "sft.episodes=0"],
    "sft.episodes": ["sft.batch_size=256"],
}
"""What makes a setting matter, or its largest value cheap, by the beginning of its key."""
QUICK = ("rollout.max_context", "rollout.temperature", "rollout.top_p", "algorithm.max_length")


def extremes() -> Iterator[Any]:
    """(key, value) for both ends of every range, and every choice."""
    for key, hint in FIELDS.items():
        kind, limits = parts(hint)
        marks = () if key in QUICK else pytest.mark.slow
        values: list[Any] = []
        if typing.get_origin(kind) is Literal:
            values = list(typing.get_args(kind))
        elif kind is bool:
            values = ["true", "false"]
        for limit in limits if kind in (int, float) else ():
            low = limit.low if limit.ends[0] == "[" else math.nextafter(limit.low, math.inf)
            high = limit.high if limit.ends[1] == "]" else math.nextafter(limit.high, -math.inf)
            values = [kind(low), kind(high), *([1] if kind is int and low == 0 else [])]
        yield from (pytest.param(key, value, marks=marks, id=f"{key}={value}") for value in values)


@pytest.mark.parametrize(("key", "value"), list(extremes()))
def test_the_ends_of_every_range_train_with_finite_metrics_or_are_refused_in_one_sentence(tmp_path, key, value):
    extra = next((extra for start, extra in sorted(WITH.items(), reverse=True) if key.startswith(start)), [])
    end = ended(tmp_path / "run", [*SMALL, *extra, f"{key}={value}"])
    assert "Traceback" not in end.how
    assert "\n" not in end.how
    assert all(math.isfinite(number) for row in end.metrics for number in row.values())
    assert all(evaluation["turns"] > 0 and evaluation["episodes"] > 0 for evaluation in end.evaluations)
    if end.how != "done":
        # A setting that the machine, or another setting, does not allow; it must be named.
        assert key in end.how or "engine.device" in end.how or key.split(".")[-1] in end.how


def test_a_folder_that_cannot_be_made_is_named_and_its_name_is_printed_as_it_is(spear, tmp_path):
    (tmp_path / "file").write_text("")
    code, text = spear("train", "lookup", *SMALL, f"run.dir={tmp_path / 'file'}")
    assert (code, f"run.dir: '{tmp_path / 'file'}' is not a folder" in text) == (2, True)
    for folder in (tmp_path / "file" / "run", tmp_path / "file" / "[/b] :smile:"):
        code, text = spear("train", "lookup", *SMALL, f"run.dir={folder}")
        assert code == 2
        assert f"run.dir: {folder} cannot be written: {tmp_path / 'file'} is not a folder" in text


def test_a_config_made_by_hand_is_checked_and_completed_before_anything_is_written(tmp_path):
    from spear_rl.app.train import sft_from, train_from

    for train in (train_from, sft_from):
        config = Config()
        config.run.dir = str(tmp_path / "run")
        config.optim.max_grad_norm = -1.0
        with pytest.raises(ConfigError, match=r"optim\.max_grad_norm must be"):
            train(config)
        assert not (tmp_path / "run").exists()
    config = load("lookup", [f"run.dir={tmp_path / 'run'}", *SMALL, "sft.episodes=0", "algorithm.name=dr-bot-grpo"])
    config.algorithm.max_length = config.algorithm.bonus.steps = config.algorithm.imitation.warm_steps = 0
    assert train_from(config)["steps"] == 2
