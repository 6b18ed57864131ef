"""Playing episodes: environments, prompts and the loop between them. Knows no tensors and never imports torch."""

from spear_rl.rollout.collect import Lockstep, collect_groups, demonstration
from spear_rl.rollout.env import INADMISSIBLE, Environment, Observation, StepResult, Task, TasksFn
from spear_rl.rollout.generator import Generator, Sampling, Stream, Streaming
from spear_rl.rollout.rendering.layouts import LAYOUTS, independent_turns, present_only, transcript
from spear_rl.rollout.rendering.renderer import ChatRenderer, Layout, Message, Renderer, growing_chat
from spear_rl.rollout.workers.runner import EnvRunner, InProcess

__all__ = [
    "INADMISSIBLE",
    "LAYOUTS",
    "ChatRenderer",
    "EnvRunner",
    "Environment",
    "Generator",
    "InProcess",
    "Layout",
    "Lockstep",
    "Message",
    "Observation",
    "Renderer",
    "Sampling",
    "StepResult",
    "Stream",
    "Streaming",
    "Task",
    "TasksFn",
    "collect_groups",
    "demonstration",
    "growing_chat",
    "independent_turns",
    "present_only",
    "transcript",
]
