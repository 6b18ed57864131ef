"""A layout with a preface per task: how to think, worked examples, and reflections on failed attempts."""

from collections.abc import Iterator, Sequence

from spear_rl.errors import ConfigError
from spear_rl.io.escaping import clipped
from spear_rl.rollout.env import Observation, Task
from spear_rl.rollout.prompting.examples import Example, Examples, ExampleTurn
from spear_rl.rollout.rendering.conversation import without_thoughts
from spear_rl.rollout.rendering.renderer import Layout, Message, Renderer
from spear_rl.types import Turn

MAX_REFLECTIONS = 3
"""Of a task, the newest ones, that its next prompt shows."""
_EMPTY_THOUGHT = "<think></think>"


class PromptedLayout:
    """A layout that shows a preface after the task's instructions, in the first message of every prompt.

    With `max_context` a task is shown as many examples as leave room for its episode, but at least one, and then as
    many reflections; ConfigError if the first prompt is too long with one example and no reflections.

    Args:
        thinks: ask for a thought before every action.
        num_shots: examples to show, if there are as many.
        grows: whether `layout` keeps the whole conversation, so that the episode needs as much room as an example.
    """

    def __init__(
        self, layout: Layout, *, thinks: bool, examples: Examples, num_shots: int, max_context: int | None, grows: bool
    ) -> None:
        self._layout, self._thinks, self._max_context, self._grows = layout, thinks, max_context, grows
        self._examples = {family: tuple(entries[:num_shots]) for family, entries in examples.items()}
        self._prefaces: dict[str, str] = {}
        self._reflections: dict[str, list[str]] = {}
        self.num_shown: dict[str, int] = {}
        """Task id -> examples shown."""

    def __call__(
        self, renderer: Renderer, task: Task, observations: Sequence[Observation], turns: Sequence[Turn]
    ) -> list[int]:
        if task.id not in self._prefaces:
            self._choose(renderer, task, observations[:1])
        return self._layout(_Prefaced(renderer, task, self._prefaces[task.id]), task, observations, turns)

    def reflect(self, task: Task, reflection: str) -> None:
        """Show a reflection in the prompts of the task's next episodes."""
        self._reflections.setdefault(task.id, []).append(reflection)
        self._prefaces.pop(task.id, None)

    def reflections(self, task: Task) -> list[str]:
        """The reflections that the prompt of the next trial contains, oldest first."""
        return self._reflections.get(task.id, [])[-MAX_REFLECTIONS:]

    def answer(self, task: Task, text: str) -> str:
        """What the environment is given of an answer: one that does not ask for thoughts itself gets none."""
        if not self._thinks or "<think" in task.instructions + task.answer_format:
            return text
        return without_thoughts(text, any_case=True).strip()

    def _choose(self, renderer: Renderer, task: Task, first: Sequence[Observation]) -> None:
        candidates = list(self._candidates(task))
        for examples, reflections in candidates:
            preface = _preface(task, examples, reflections, thinks=self._thinks)
            self._prefaces[task.id], self.num_shown[task.id] = preface, len(examples)
            if self._max_context is None:
                return
            prompt = self._layout(_Prefaced(renderer, task, preface), task, first, [])
            is_last = (examples, reflections) == candidates[-1]
            if len(prompt) + (0 if is_last else self._room(renderer, task, examples)) <= self._max_context:
                return
        if self._examples.get(task.family):
            limit = f"rollout.max_context={self._max_context}"
            fault = f"not even one worked example fits before {clipped(task.id, 200)}"
            raise ConfigError(f"{limit}: {fault}: raise it, or give a shorter one with --examples")

    def _candidates(self, task: Task) -> Iterator[tuple[Sequence[Example], Sequence[str]]]:
        """Fewer examples first, down to one, then fewer reflections, the oldest left out first."""
        examples, reflections = self._examples.get(task.family, ()), self.reflections(task)
        for count in range(len(examples), 1, -1):
            yield examples[:count], reflections
        for start in range(len(reflections) + 1):
            yield examples[:1], reflections[start:]

    def _room(self, renderer: Renderer, task: Task, examples: Sequence[Example]) -> int:
        """Tokens to leave for the episode itself: judged by the longest example, or by two of its turns."""

        def size(turns: Sequence[ExampleTurn]) -> int:
            return len(renderer.prompt([{"role": "user", "content": _transcript(task, turns)}]))

        if self._grows:
            return max((size(example.turns) for example in examples), default=0)
        return 2 * max((size([turn]) for example in examples for turn in example.turns), default=0)


def worked_answer(task: Task, thought: str, action: str) -> str:
    """A thought and an action in the task's answer format.

    "{action}"                                  -> "<think>hm</think>look"
    "<think></think><action>{action}</action>"  -> "<think>hm</think><action>look</action>"
    """
    before, empty, after = task.answer_format.partition(_EMPTY_THOUGHT)
    if not empty:
        before, after = "", task.answer_format
    return f"{before.format(action=action)}<think>{thought}</think>{after.format(action=action)}"


def _preface(task: Task, examples: Sequence[Example], reflections: Sequence[str], *, thinks: bool) -> str:
    parts = []
    if thinks:
        form = worked_answer(task, "your thought", "your action")
        parts.append(f"Think before every action. Write each answer in this form: {form}")
    if examples:
        count = "a worked example" if len(examples) == 1 else f"{len(examples)} worked examples"
        parts.append(f"First {count}, from other tasks.")
        for number, example in enumerate(examples, 1):
            parts.append(f"Example {number}\n{_transcript(task, example.turns)}")
    if reflections:
        parts.append("You have tried this task before without success. What you noted after earlier attempts:")
        parts[-1] += "".join(f"\n- {reflection}" for reflection in reflections)
    if examples or reflections:
        parts.append("Now your task.")
    return "\n\n".join(parts)


def _transcript(task: Task, turns: Sequence[ExampleTurn]) -> str:
    lines = []
    for turn in turns:
        lines += [f"Observation: {turn.observation}"] if turn.observation else []
        lines.append(f"Answer: {worked_answer(task, turn.thought, turn.action)}")
    return "\n".join(lines)


class _Prefaced:
    """A renderer that puts `preface` between a task's instructions and its first observation."""

    def __init__(self, renderer: Renderer, task: Task, preface: str) -> None:
        self._renderer, self._instructions, self._preface = renderer, task.instructions, preface
        self.extended, self.answer, self.parse = renderer.extended, renderer.answer, renderer.parse

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        *system, message = messages
        content: str = message["content"]
        shown = f"{self._instructions}\n\n"
        start = len(shown) if self._instructions and content.startswith(shown) else 0
        parts = [content[:start].strip(), self._preface, content[start:]]
        return self._renderer.prompt([*system, message | {"content": "\n\n".join(filter(None, parts))}])
