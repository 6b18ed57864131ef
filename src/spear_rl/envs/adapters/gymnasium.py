"""`gymnasium:ID`: environments of Gymnasium and of packages that register with it, as text or as pictures."""

import io
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Annotated, Any

from spear_rl.envs.adapters.shared import (
    ANSWER_FORMAT,
    EXPERTS,
    SPLITS,
    answered,
    best_random_play,
    one_line,
    package,
    seeds,
    state_key,
)  # fmt: skip
from spear_rl.envs.adapters.spaces import action_fault, action_of, choices, observation_fault, observed, plain_picture
from spear_rl.errors import ConfigError, MissingExtraError, OptionError
from spear_rl.rollout.env import INADMISSIBLE, Observation, StepResult, Task
from spear_rl.settings.names import option_function
from spear_rl.settings.ranges import Length, OneOf, Range, has_checked_options

VIEWS = ("auto", "state", "ansi", "image", "both")
_RULE = re.compile(r"reward|terminated|info\.(?P<info>\w+)|return>=(?P<least>-?\d+(\.\d+)?)")
_RULES = "reward, terminated, return>=NUMBER or info.NAME"


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a game beyond its spaces."""

    actions: tuple[str, ...] = ()
    success: str = "reward"
    explained: str = ""


_MOVES = ("left", "down", "right", "up")
_LAKE = Known(_MOVES, explained="Walk from S to G over the ice F, not into a hole H. [ ] is where you are.")
KNOWN = {
    "FrozenLake": _LAKE,
    "FrozenLake8x8": _LAKE,
    "CliffWalking": Known(("up", "right", "down", "left"), "terminated", "Walk from x to T around the cliff C."),
    "Taxi": Known(
        ("south", "north", "east", "west", "pickup", "dropoff"),
        explained="[ ] is your taxi, < > with its passenger; fetch the passenger at ( ) and drive to { }.",
    ),
    "Blackjack": Known(("stick", "hit"), explained="You see your sum, the dealer's card and whether you have an ace."),
    "CartPole": Known(("left", "right"), "return>=100"),
    "MountainCar": Known(("left", "none", "right"), "terminated"),
    "Acrobot": Known(("left", "none", "right"), "terminated"),
}
"""Game -> names of its actions and when it is solved, where Gymnasium itself does not say."""


def _known(id: str) -> Known:
    """What is known of `module:namespace/NAME-v0`, of which module and namespace may be missing."""
    return KNOWN.get(id.rpartition(":")[2].rpartition("/")[2].rpartition("-")[0], Known())


@dataclass(frozen=True, slots=True)
class Game:
    """How one environment is made and put into words; picklable."""

    id: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    seeded: str = ""
    view: str = "state"
    actions: tuple[str, ...] = ()
    success: str = "reward"

    def make(self, seed: int) -> Any:
        """The Gymnasium environment of a task, not reset yet."""
        own = option_function(self.seeded, "seeded")(seed) if self.seeded else {}
        mode = {"ansi": "ansi", "image": "rgb_array", "both": "rgb_array"}.get(self.view)
        if mode == "rgb_array":
            os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame draws without a screen
        return _made(self.id, {**self.kwargs, **own, **({"render_mode": mode} if mode else {})})


@has_checked_options
def tasks(
    split: Annotated[str, OneOf(SPLITS, "split")] = "train",
    *,
    id: Annotated[str, Length(1, 256, "characters")],
    actions: Sequence[Annotated[str, Length(1, 100, "characters")]] = (),
    observation: Annotated[str, OneOf(VIEWS, "observation")] = "auto",
    success: Annotated[str, Length(0, 100, "characters")] = "",
    seeded: Annotated[str, Length(0, 256, "characters")] = "",
    expert: Annotated[str, Length(1, 256, "characters")] = "random",
    tries: Annotated[int, Range(1, 10_000, unit="episodes")] = 100,
    random_turns: Annotated[int, Range(1, 10_000, unit="turns")] = 100,
    instructions: Annotated[str, Length(0, 100_000, "characters")] = "",
    max_tasks: Annotated[int, Range(0, 1_000_000)] | None = None,
    **make: Any,
) -> Sequence[Task]:
    """The tasks of a split: one per seed. Other options are keywords of `gymnasium.make`.

    Args:
        actions: words for the numbers of a discrete action space.
        success: when an episode counts as solved: its last reward is positive (reward), it ends by itself
            (terminated), its rewards add up to a number (return>=200), or its info says so (info.NAME).
        seeded: a function of yours, module:function, from a task's seed to further keywords of `gymnasium.make`.
        expert: random (the first solved, or else the best, of `tries` random episodes of at most `random_turns`),
            none, or your module:function from the environment after its reset and a seed to a list of actions.
        instructions: instead of ours.
    """
    game, space = _described(id, make, seeded, observation, tuple(actions), success)
    if expert not in EXPERTS:
        option_function(expert, "expert")
    said = choices(space, game.actions)
    told = instructions or _instructions(id, said, space)
    return tuple(
        Task(
            id=f"gymnasium/{id}/{name}",
            make_env=partial(GymnasiumEnv, game, seed),
            family=id,
            instructions=told,
            answer_format=ANSWER_FORMAT,
            demonstrate=_demonstrator(game, seed, expert, tries, random_turns)
            if said or expert not in EXPERTS
            else None,
        )
        for name, seed in seeds(split, max_tasks)
    )


def _described(
    id: str, make: dict[str, Any], seeded: str, view: str, actions: tuple[str, ...], success: str
) -> tuple[Game, Any]:
    """The game, and its action space; refuses what cannot be played in words or pictures."""
    known = _known(id)
    rule = success or known.success
    if not _RULE.fullmatch(rule):
        raise OptionError(f"success: {rule!r} is no rule; write {_RULES}")
    game = Game(id, make, seeded, success=rule)
    env = game.make(seed=0)
    try:
        space, seen = env.action_space, env.observation_space
        modes = env.metadata.get("render_modes") or ()
    finally:
        env.close()
    if fault := action_fault(space):
        what = f"gymnasium:{id} takes actions from {fault}"
        raise OptionError(f"actions: {what}: wrap it into an environment with Discrete, MultiDiscrete or Text actions")
    names = actions or known.actions
    if names and type(space).__name__ == "Discrete" and (len(names) != space.n or len({*names}) != len(names)):
        if actions:
            raise OptionError(f"actions: {id} has {space.n} actions, and {len({*names})} different names are given")
        names = ()
    if view == "auto":
        view = "ansi" if "ansi" in modes and type(seen).__name__ == "Discrete" else "state"
    needed = {"ansi": "ansi", "image": "rgb_array", "both": "rgb_array"}.get(view)
    if needed and needed not in modes:
        raise OptionError(f"observation: {id} cannot be rendered as {needed}; it has: {', '.join(modes) or 'nothing'}")
    if view in ("state", "both") and (fault := observation_fault(seen)):
        way_out = " (observation=image shows pictures to a vision-language model)" if "rgb_array" in modes else ""
        raise OptionError(f"observation: gymnasium:{id} gives {fault}{way_out}")
    game = replace(game, view=view, actions=names)
    if needed == "rgb_array":
        package("PIL.Image", extra="vision")
        _first_picture(game)
    return game, space


def _first_picture(game: Game) -> None:
    """Renders once, as some environments need a further package for it."""
    env = GymnasiumEnv(game, seed=0)
    try:
        env.reset()
    except package("gymnasium", extra="gymnasium").error.DependencyNotInstalled as error:
        raise MissingExtraError(
            f"task.options.observation: {game.id} needs more packages: {one_line(error)}"
        ) from error
    finally:
        env.close()


def _instructions(id: str, said: Sequence[str], space: Any) -> str:
    known, kind = _known(id), type(space).__name__
    how = (
        f"one of: {', '.join(said)}" if said else "your text" if kind == "Text" else f"numbers of {space}, with spaces"
    )
    return f"You play {id}. {known.explained}{' ' * bool(known.explained)}Answer within <action></action> with {how}."


def _made(id: str, kwargs: dict[str, Any]) -> Any:
    gymnasium = package("gymnasium", extra="gymnasium")
    try:
        # Gymnasium's own checks and warnings are for authors of environments; order and time limits stay.
        return gymnasium.make(id, disable_env_checker=True, **kwargs)
    except gymnasium.error.DependencyNotInstalled as error:
        raise MissingExtraError(f"task.env: gymnasium:{id} needs more packages: {one_line(error)}") from error
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        near = _nearest(gymnasium, id)
        raise ConfigError(f"task.env: Gymnasium has no environment {id!r} ({one_line(error)}){near}") from error
    except TypeError as error:
        given = ", ".join(sorted(kwargs))
        raise OptionError(f"{given or 'id'}: making {id} raised {one_line(error)}") from error


def _nearest(gymnasium: Any, id: str) -> str:
    import difflib

    close = difflib.get_close_matches(id, list(gymnasium.registry), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _demonstrator(game: Game, seed: int, expert: str, tries: int, max_turns: int) -> Callable[[int], list[str]] | None:
    if expert == "random":
        return partial(best_random_play, partial(GymnasiumEnv, game, seed), tries, max_turns, ())
    return None if expert == "none" else partial(_users_play, game, seed, expert)


def _users_play(game: Game, task_seed: int, expert: str, seed: int) -> list[str]:
    env = game.make(task_seed)
    try:
        env.reset(seed=task_seed)
        return [str(action) for action in option_function(expert, "expert")(env, seed)]
    finally:
        env.close()


class GymnasiumEnv:
    """One episode of a Gymnasium environment; every reset begins the same one."""

    def __init__(self, game: Game, seed: int) -> None:
        self._game, self._seed = game, seed
        self._env: Any = None
        self._seen: Observation | None = None
        self._return = 0.0

    def reset(self) -> Observation:
        if self._env is None:
            self._env = self._game.make(self._seed)
        self._return = 0.0
        self._env.action_space.seed(self._seed)
        first, _ = self._env.reset(seed=self._seed)
        self._seen = self._observation(first)
        return self._seen

    def step(self, action: str) -> StepResult:
        if self._seen is None:
            raise RuntimeError("no episode is under way: call reset() first, or make a new environment")
        said = answered(action)
        move = None if said.invalid else action_of(self._env.action_space, self._game.actions, said.command)
        if move is None:
            invalid = said.invalid or INADMISSIBLE
            return StepResult(self._seen, invalid=invalid, success=False, action=said.command)
        after, reward, terminated, truncated, info = self._env.step(move)
        self._return += float(reward)
        self._seen = seen = self._observation(after)
        is_over = bool(terminated or truncated)
        success = is_over and self._is_solved(float(reward), bool(terminated), info)
        if is_over:
            self._seen = None
        return StepResult(seen, reward=float(reward), done=is_over, success=success, action=said.command)

    def close(self) -> None:
        self._seen = None
        if self._env is not None:
            self._env.close()
            self._env = None

    def _is_solved(self, reward: float, terminated: bool, info: dict[str, Any]) -> bool:
        rule = _RULE.fullmatch(self._game.success)
        if rule and rule["info"]:
            return bool(info.get(rule["info"], False))
        if rule and rule["least"]:
            return self._return >= float(rule["least"])
        return terminated and (self._game.success == "terminated" or reward > 0)

    def _observation(self, value: Any) -> Observation:
        game, space = self._game, self._env.observation_space
        text = "" if game.view in ("ansi", "image") else observed(space, value)
        key = text
        images: tuple[bytes, ...] = ()
        if game.view == "ansi":
            text = plain_picture(str(self._env.render()))
            key = observed(space, value) if not observation_fault(space) else text
        elif game.view in ("image", "both"):
            images = (png(self._env.render()),)
            key = key or images[0].hex()
            text = text or "The picture shows the game."
        key = "" if type(space).__name__ == "Text" else state_key(key)  # a text need not tell states apart
        return Observation(text, state_key=key, choices=choices(self._env.action_space, game.actions), images=images)


def png(pixels: Any) -> bytes:
    """A rendered array as a PNG file."""
    from PIL import Image

    return _png(pixels.tobytes(), pixels.shape[1], pixels.shape[0], Image)


@lru_cache(maxsize=1024)  # siblings visit the same states, and their trajectories then share one image
def _png(data: bytes, width: int, height: int, image: Any) -> bytes:
    file = io.BytesIO()
    image.frombytes("RGB", (width, height), data).save(file, format="PNG")
    return file.getvalue()
