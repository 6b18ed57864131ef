"""The option --prompting of `spear eval`: ReAct and Reflexion around any policy that reads prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_type_hints

from spear_rl.app.build.rollout import Player, eval_sampling_of, tasks_of
from spear_rl.app.config import Config
from spear_rl.errors import ConfigError
from spear_rl.io.escaping import clipped
from spear_rl.rollout.collect import EpisodesFailedError
from spear_rl.rollout.env import Task
from spear_rl.rollout.generator import Generator, Sampling
from spear_rl.rollout.prompting.examples import ANY_FAMILY, Example, examples_in, expert_examples
from spear_rl.rollout.prompting.layout import PromptedLayout
from spear_rl.rollout.prompting.reflexion import Attempts, play_trials, reflection_in, reflection_messages
from spear_rl.rollout.workers.progress import ProgressRunner
from spear_rl.settings.ranges import Range, checked
from spear_rl.train.evaluate import wilson_interval
from spear_rl.types import Group

REFLECTION_TOKENS = 256
MAX_TRANSCRIPT = 12_000
"""Characters of the failed attempt that a reflection is written about; halved until they fit rollout.max_context."""
_SEED_STRIDE = 1_000_003

GeneratorOf = Callable[[Sampling, int], Generator]
"""Sampling and a number that is added to the seed in, 0 in the first trial; the policy out."""


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """The options --prompting, --shots, --trials and --examples; None and an empty name if left out."""

    prompting: Literal["none", "react", "reflexion"] = "none"
    shots: Annotated[int, Range(0, 64)] | None = None
    trials: Annotated[int, Range(1, 100)] | None = None
    examples: str = ""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(PromptOptions, include_extras=True).items():
            checked(getattr(self, name), hint, f"--{name}")
        if not self.is_used and (self.shots is not None or self.trials is not None or self.examples):
            raise ConfigError("--shots, --trials and --examples need --prompting react or --prompting reflexion")
        if self.prompting == "react" and self.trials is not None:
            raise ConfigError("--trials is for --prompting reflexion; --prompting react plays a task once")
        if self.examples and not self.num_shots:
            raise ConfigError("--examples with --shots 0 shows none of them: leave out one of the two")

    @property
    def is_used(self) -> bool:
        return self.prompting != "none"

    @property
    def num_shots(self) -> int:
        return 2 if self.shots is None else self.shots

    @property
    def num_trials(self) -> int:
        return 3 if self.trials is None else self.trials


@dataclass(frozen=True, slots=True)
class Trials:
    """What Reflexion's trials gave."""

    attempts: Sequence[Attempts]
    num_trials: int

    @property
    def groups(self) -> list[Group]:
        """Per task its last episode, with the failures of all of them."""
        groups = []
        for attempt in self.attempts:
            lost, last = sum(group.num_failed for group in attempt.groups), attempt.last
            groups.append(replace(attempt.groups[-1], trajectories=[last] if last else [], num_failed=lost))
        return groups

    @property
    def rates(self) -> dict[str, dict[str, float]]:
        """success@n: the share of tasks solved in one of the first n trials, with its 95 % interval."""
        solved_in = [attempt.solved_in for attempt in self.attempts if attempt.last]
        rates = {}
        for trial in range(1, self.num_trials + 1):
            solved = sum(number is not None and number <= trial for number in solved_in)
            low, high = wilson_interval(solved, len(solved_in))
            rates[f"success@{trial}"] = {
                "rate": solved / max(len(solved_in), 1), "low": low, "high": high, "tasks": len(solved_in)
            }  # fmt: skip
        return rates

    def as_dict(self) -> dict[str, Any]:
        return {"trials": self.rates, "attempts": {entry.task.id: _attempts(entry) for entry in self.attempts}}


def _attempts(entry: Attempts) -> list[dict[str, Any]]:
    """One row per trial that was played; `reflection` is what was written after it."""
    reflections = iter(entry.reflections)
    rows: list[dict[str, Any]] = []
    for trial, group in enumerate(entry.groups, 1):
        rows.append({"trial": trial, "failed": not group.trajectories})
        for played in group.trajectories:
            rows[-1] |= {"success": played.success, "reward": played.reward, "turns": len(played.turns)}
            rows[-1] |= {"stop": str(played.stop)} | ({} if played.success else {"reflection": next(reflections, None)})
    return rows


class Prompted:
    """Changes the prompts of a player, and plays Reflexion's trials with it."""

    def __init__(self, options: PromptOptions, config: Config, player: Player, tasks: Sequence[Task], split: str):
        self._options, self._config, self._player, self._tasks = options, config, player, tasks
        self._examples = self._chosen_examples(split) if options.num_shots else {}
        self._layout = PromptedLayout(
            player.layout,
            thinks=options.prompting == "react" or options.num_shots > 0,
            examples=self._examples,
            num_shots=options.num_shots,
            max_context=player.max_context,
            grows=config.rollout.layout == "chat",
        )
        player.layout, player.answer = self._layout, self._layout.answer

    def _chosen_examples(self, split: str) -> dict[str, tuple[Example, ...]]:
        options, families = self._options, list(dict.fromkeys(task.family for task in self._tasks))
        if options.examples:
            given = examples_in(options.examples)
            for family in families:
                if family not in given and ANY_FAMILY not in given:
                    lacks = f"--examples: {options.examples} has no example of {clipped(family, 100)!r}"
                    raise ConfigError(f"{lacks}: add one, or examples for all other kinds under {ANY_FAMILY!r}")
            return {family: (given.get(family) or given[ANY_FAMILY])[: options.num_shots] for family in families}
        if split == "train":
            raise ConfigError(
                "--split train: worked examples are training tasks, so these cannot be evaluated with them: "
                "name another split, or give --examples FILE"
            )
        return expert_examples(
            families,
            tasks_of(self._config, "train"),
            count=options.num_shots,
            excluded=frozenset(task.id for task in self._tasks),
            seed=self._config.run.seed,
            envs=self._player.envs,
        )

    def about(self) -> dict[str, Any]:
        """What the report says of it; complete after the episodes."""
        options = self._options
        about: dict[str, Any] = {"name": options.prompting, "shots": options.num_shots}
        if options.prompting == "reflexion":
            about["trials"] = options.num_trials
        if options.examples:
            about["file"] = options.examples
        about["examples"] = {
            family: [example.source for example in examples] for family, examples in self._examples.items()
        }
        return {"prompting": about | {"examples_shown": self._layout.num_shown, "notes": self._notes()}}

    def _notes(self) -> list[str]:
        wanted = self._options.num_shots
        notes = [
            f"worked examples of {clipped(family, 100)!r}: {len(examples)} instead of {wanted}, as there are no more"
            for family, examples in self._examples.items()
            if len(examples) < wanted
        ]
        cut = [
            task
            for task in self._tasks
            if self._layout.num_shown.get(task.id, wanted) < len(self._examples.get(task.family, ()))
        ]
        if cut:
            fewest = min(self._layout.num_shown[task.id] for task in cut)
            what = f"{len(cut)} of {len(self._tasks)} tasks had fewer than {wanted} worked examples, at least {fewest}"
            notes.append(f"{what}: rollout.max_context={self._config.rollout.max_context} has no room for more")
        return notes

    def trials(self, generator_of: GeneratorOf, envs: ProgressRunner) -> Trials:
        """Reflexion: every task until it is solved, with a reflection after each failed attempt."""
        config, player, layout = self._config, self._player, self._layout
        sampling = eval_sampling_of(config)

        def play(tasks: Sequence[Task], trial: int) -> Sequence[Group]:
            if trial > 1:
                envs.tally.num_episodes += len(tasks)
            generator = generator_of(sampling, 2 * (trial - 1) * _SEED_STRIDE)
            try:
                return player.groups(tasks, generator, group_size=1, step=0, max_turns=config.eval.max_turns)
            except EpisodesFailedError:
                if trial == 1:
                    raise
                return [Group(task.id, [], step=0, info={"family": task.family}, num_failed=1) for task in tasks]

        def reflect(failed: Sequence[Attempts], trial: int) -> Sequence[str]:
            length, room = self._reflection_room()
            own = replace(sampling, stop=(), max_new_tokens=length)
            generator = generator_of(own, (2 * trial - 1) * _SEED_STRIDE)
            prompts = [
                self._reflection_prompt(attempt, envs.endings.get(attempt.task.id, ""), room) for attempt in failed
            ]
            answers = generator.generate(prompts)
            texts = [reflection_in(player.renderer.parse(answer.token_ids)) for answer in answers]
            for attempt, text in zip(failed, texts, strict=True):
                if text:
                    layout.reflect(attempt.task, text)
            return texts

        num_trials = self._options.num_trials
        return Trials(play_trials(self._tasks, num_trials=num_trials, play=play, reflect=reflect), num_trials)

    def _reflection_room(self) -> tuple[int, int | None]:
        """Tokens of a reflection and of the prompt that asks for it: both together as long as any other turn."""
        most, new = self._player.max_context, self._config.rollout.max_new_tokens
        length = max(REFLECTION_TOKENS, new)
        if most is None:
            return length, None
        length = min(length, max(new, most // 4))
        return length, most + new - length

    def _reflection_prompt(self, attempt: Attempts, ending: str, room: int | None) -> list[int]:
        """The longest request that fits; if none does, the end of the shortest."""
        assert attempt.last is not None
        max_chars, earlier = MAX_TRANSCRIPT, self._layout.reflections(attempt.task)
        while True:
            messages = reflection_messages(
                attempt.task, attempt.last, ending=ending, earlier=earlier, max_chars=max_chars
            )
            prompt = self._player.renderer.prompt(messages)
            if room is None or len(prompt) <= room:
                return prompt
            if max_chars < 100:
                return prompt[-room:]
            max_chars //= 2
