"""Playing episodes: environments, prompts and the loop between them. Knows no tensors and never imports torch."""

from spear_rl.rollout.collect import collect_groups, demonstration
from spear_rl.rollout.env import INADMISSIBLE, Environment, Observation, StepResult, Task, TasksFn
from spear_rl.rollout.generator import Generator, Sampling
from spear_rl.rollout.layout import LAYOUTS, Layout, growing_chat, independent_turns
from spear_rl.rollout.renderer import ChatRenderer, Message, Renderer

__all__ = [
    "INADMISSIBLE",
    "LAYOUTS",
    "ChatRenderer",
    "Environment",
    "Generator",
    "Layout",
    "Message",
    "Observation",
    "Renderer",
    "Sampling",
    "StepResult",
    "Task",
    "TasksFn",
    "collect_groups",
    "demonstration",
    "growing_chat",
    "independent_turns",
]
