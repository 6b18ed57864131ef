"""`textarena:GAME-v0`: games of TextArena, alone or against an opponent of yours."""

import io
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from spear_rl.envs.adapters.shared import (
    ANSWER_FORMAT,
    EXPERTS,
    SPLITS,
    answered,
    best_random_play,
    missing_word_list,
    one_line,
    package,
    seeds,
    state_key,
)  # fmt: skip
from spear_rl.errors import ConfigError, MissingExtraError, OptionError, UserError
from spear_rl.rollout.env import INADMISSIBLE, Observation, StepResult, Task
from spear_rl.settings.names import option_function
from spear_rl.settings.ranges import Length, OneOf, Range, has_checked_options, nearest

MAX_OPPONENT_TURNS = 1000
"""Turns in a row without the policy's; more end the episode with an error."""

REWARDS = {"game": "the game's own, also for progress", "win": "1 for a game that is won, else 0"}


@dataclass(frozen=True, slots=True)
class Game:
    """How one game is made; picklable."""

    id: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    num_players: int = 1
    player: int = 0
    opponent: str = ""
    actions: tuple[str, ...] = ()
    success: float = 1.0
    reward: str = "game"

    def make(self) -> tuple[Any, bool]:
        """The game without TextArena's wrappers, and whether they put actions into brackets."""
        textarena = _textarena()
        registry = package("textarena.envs.registration", extra="textarena").ENV_REGISTRY
        if self.id not in registry:
            raise ConfigError(f"task.env: TextArena has no game {self.id!r}{nearest(self.id, registry)}")
        try:
            env, has_brackets = textarena.make(self.id, **self.kwargs), False
        except (TypeError, AssertionError) as error:
            raise OptionError(f"{', '.join(self.kwargs) or 'id'}: making {self.id} raised {one_line(error)}") from error
        except Exception as error:  # word lists, packages and Python versions of single games
            if words := missing_word_list(error):
                raise MissingExtraError(f"task.env: textarena:{self.id} needs {words}") from error
            raise MissingExtraError(f"task.env: textarena:{self.id} cannot be made here: {one_line(error)}") from error
        while isinstance(env, textarena.Wrapper):
            has_brackets |= type(env).__name__ == "ActionFormattingWrapper"
            env = env.env
        return env, has_brackets


def _textarena() -> Any:
    with redirect_stderr(io.StringIO()):  # nltk keeps the stderr of its import for errors of its downloads
        return package("textarena", extra="textarena")


@has_checked_options
def tasks(
    split: Annotated[str, OneOf(SPLITS, "split")] = "train",
    *,
    id: Annotated[str, Length(1, 256, "characters")],
    actions: Sequence[Annotated[str, Length(1, 1000, "characters")]] = (),
    num_players: Annotated[int, Range(1, 100, unit="players")] = 1,
    player: Annotated[int, Range(0, 99)] = 0,
    opponent: Annotated[str, Length(0, 256, "characters")] = "",
    success: Annotated[float, Range(-1e6, 1e6)] = 1.0,
    reward: Annotated[str, OneOf(REWARDS, "reward", REWARDS)] = "game",
    expert: Annotated[str, Length(1, 256, "characters")] = "random",
    tries: Annotated[int, Range(1, 10_000, unit="episodes")] = 100,
    random_turns: Annotated[int, Range(1, 10_000, unit="turns")] = 100,
    max_tasks: Annotated[int, Range(0, 1_000_000)] | None = None,
    **make: Any,
) -> Sequence[Task]:
    """The tasks of a split: one per seed. Other options are keywords of the game.

    Args:
        actions: the moves that random play draws from; those that the game refuses are taken back.
        opponent: plays the other players: your module:function from what it has seen, a text, to its move.
        success: the game's reward from which it counts as won.
        reward: game, its own, which may pay progress; or win, 1 for a game that is won.
        expert: random (the first solved, or else the best, of `tries` random games of at most `random_turns`; needs
            `actions`), none, or your module:function from the game after its reset and a seed to a list of moves.
    """
    game = Game(id, make, num_players, player, opponent, tuple(actions), success, reward)
    _require_playable(game)
    if expert not in EXPERTS:
        option_function(expert, "expert")
    return tuple(
        Task(
            id=f"textarena/{id}/{name}",
            make_env=partial(TextArenaEnv, game, seed),
            family=id,
            instructions="Play the game. Give your move within <action></action>.",
            answer_format=ANSWER_FORMAT,
            demonstrate=_demonstrator(game, seed, expert, tries, random_turns),
        )
        for name, seed in seeds(split, max_tasks)
    )


def _require_playable(game: Game) -> None:
    if game.player >= game.num_players:
        raise OptionError(f"player is {game.player}, and the players are 0 to {game.num_players - 1}")
    if game.num_players > 1 and not game.opponent:
        raise OptionError("opponent: a game of several players needs one, opponent=my_module:function")
    if game.opponent:
        option_function(game.opponent, "opponent")
    env = TextArenaEnv(game, seed=0)
    try:
        env.reset()
    except AssertionError as error:
        how = "give task.options.num_players=2 and task.options.opponent=my_module:function"
        what = f"{game.id} cannot be played with num_players={game.num_players} ({one_line(error)})"
        raise OptionError(f"num_players: {what}: {how}") from error
    except UserError:
        raise
    except Exception as error:
        raise MissingExtraError(f"task.env: textarena:{game.id} cannot begin here: {one_line(error)}") from error


def _demonstrator(game: Game, seed: int, expert: str, tries: int, max_turns: int) -> Callable[[int], list[str]] | None:
    if expert == "random" and game.actions:
        return partial(best_random_play, partial(TextArenaEnv, game, seed), tries, max_turns, game.actions)
    return None if expert in EXPERTS else partial(_users_play, game, seed, expert)


def _users_play(game: Game, task_seed: int, expert: str, seed: int) -> list[str]:
    env = TextArenaEnv(game, task_seed)
    env.reset()
    return [str(action) for action in option_function(expert, "expert")(env.game, seed)]


class TextArenaEnv:
    """One game. TextArena uses Python's global random generator; here every game restores a state of its own."""

    def __init__(self, game: Game, seed: int) -> None:
        self._game, self._seed, self._is_over = game, seed, True
        self._random = random.Random(seed).getstate()
        self._said: list[str] = []
        self.game: Any = None
        self._has_brackets = False

    def reset(self) -> Observation:
        self._random, self._said = random.Random(self._seed).getstate(), []
        with self._own_stream():
            self.game, self._has_brackets = self._game.make()
            self.game.reset(num_players=self._game.num_players, seed=self._seed)
            self._is_over = False
            text, _, done = self._until_own_turn(False)
        if done:
            raise RuntimeError(f"{self._game.id} was over before the first move of player {self._game.player}")
        return self._observation(text)

    def step(self, action: str) -> StepResult:
        if self._is_over:
            raise RuntimeError("no episode is under way: call reset() first, or make a new environment")
        said = answered(action)
        if said.invalid:
            seen = self._observation("Give your move within <action></action>.")
            return StepResult(seen, invalid=said.invalid, success=False, action="")
        self._said.append(said.command)
        with self._own_stream():
            done, _ = self.game.step(self._in_brackets(said.command))
            text, is_refused, done = self._until_own_turn(done)
            rewards, info = self.game.close() if done else (None, None)
        reward = float((rewards or {}).get(self._game.player, 0.0))
        own = (info or {}).get(self._game.player, {})
        if done:
            self._is_over = True
            text = "\n".join(filter(None, (text, str(own.get("reason") or "")))) or "The game is over."
            is_refused = bool(own.get("invalid_move"))
        is_won = done and not is_refused and reward >= self._game.success
        if self._game.reward == "win":
            reward = float(is_won)
        return StepResult(
            self._observation(text),
            reward=min(reward, 0.0) if is_refused else reward,  # a move against the rules is never paid
            done=done,
            invalid=INADMISSIBLE if is_refused else "",
            success=is_won,
            action=said.command,
        )

    def close(self) -> None:
        self._is_over = True

    def _until_own_turn(self, done: bool) -> tuple[str, bool, bool]:
        """(what the policy is told, whether its move was refused, whether the game is over), after the others moved."""
        if self._game.num_players == 1:
            text, is_refused = self._told(self.game.state.observations[0])
            self.game.state.observations[0] = []
            return text, is_refused, bool(done)
        for _ in range(MAX_OPPONENT_TURNS):
            current = self.game.state.current_player_id
            if done or current == self._game.player:
                break
            _, messages = self.game.get_observation()
            move = option_function(self._game.opponent, "opponent")(self._told(messages)[0])
            done, _ = self.game.step(self._in_brackets(str(move)))
        else:
            raise RuntimeError(f"{self._game.id}: the other players moved {MAX_OPPONENT_TURNS} times in a row")
        messages = self.game.state.observations[self._game.player]
        text, is_refused = self._told(messages)
        self.game.state.observations[self._game.player] = []
        return text, is_refused, bool(done)

    def _told(self, messages: Sequence[tuple[int, str, Any]]) -> tuple[str, bool]:
        """Messages without the reader's own moves, and whether they refuse one."""
        heard = [(text, kind.name) for source, text, kind in messages if source != self._game.player]
        is_refused = any(kind == "GAME_ADMIN" and "invalid" in text.lower() for text, kind in heard)
        return "\n".join(text.strip() for text, _ in heard), is_refused

    def _in_brackets(self, move: str) -> str:
        return f"[{move}]" if self._has_brackets and "[" not in move and "]" not in move else move

    def _observation(self, text: str) -> Observation:
        return Observation(text or "It is your move.", state_key=state_key(self._said))

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """A random stream of its own, and nothing printed: some games do."""
        outside = random.getstate()
        random.setstate(self._random)
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                yield
        finally:
            self._random = random.getstate()
            random.setstate(outside)
