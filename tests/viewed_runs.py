"""Runs as `spear view` finds them, made without training; and a server of them."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spear_rl.io.episodes.parts import EpisodeWriter
from spear_rl.types import Completion, Group, Stop, Trajectory, Turn

PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
    "0000000c49444154789c63f8cfc00000030101006318de960000000049454e44ae426082"
)
HOSTILE = (
    "</pre></script><script>document.title='owned';window.owned=1</script><img src=x onerror=\"window.owned=1\">"
    "\x1b[31mred\x1b[0m \x00 \ud800 a\u202eevil\u2066 {{ 7*7 }} javascript:alert(1) ' \" & &lt;"
)


class LiveRun:
    """A run that writes a step when it is told to."""

    def __init__(
        self, folder: Path, *, seed: int = 0, text: str = "", images: tuple[bytes, ...] = (), has_entropy: bool = True
    ) -> None:
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text("")
        self.folder, self.rng, self.text, self.images = folder, random.Random(seed), text, images
        self.writer = EpisodeWriter(folder / "trajectories", 10**9, lambda ids: [f" w{number}" for number in ids])
        self.step, self.has_entropy = 0, has_entropy

    def write(self, steps: int = 1) -> LiveRun:
        for _ in range(steps):
            self._write()
        return self

    def _write(self) -> None:
        rng, step = self.rng, self.step
        groups = [
            Group(f"task {step}-{family}{self.text}", [self._episode() for _ in range(4)], step, {"family": family})
            for family in ("heat", "cool")
        ]
        played = [t for group in groups for t in group.trajectories]
        advantages = [[rng.uniform(-1, 1)] * len(t.turns) for t in played]
        dropped = [["overlong" if rng.random() < 0.2 else "" for _ in t.turns] for t in played]
        self.writer.write(step, groups, advantages, dropped)
        if step:
            draw = {"episode": f"{step - 1}/3", "played": step - 1, "age": 1, "task": "task", "family": "heat"}
            draw |= {"success": True, "reward": 1.0, "advantage": 0.5, "advantage_today": 0.25}
            _append(self.folder / "draws.jsonl", {"step": step, "draws": [draw]})
        left = [f"{step - 3}/3"] if step > 2 else []
        _append(self.folder / "buffer.jsonl", {"step": step, "entered": [f"{step}/3"], "left": left})
        row = {"step": step, "rollout/success": rng.random(), "rollout/episodes": 8.0, "policy/entropy": rng.random()}
        row |= {"replay/eligible": 3.0, "replay/buffer_size": 4.0, "time/step": 1.0}
        _append(self.folder / "metrics.jsonl", row)
        self.step += 1

    def _episode(self) -> Trajectory:
        rng, turns, prompt = self.rng, [], [1, 2]
        for n in range(rng.randint(1, 3)):
            ids = [rng.randrange(100) for _ in range(4)]
            entropies = [0.8 * n for n in range(len(ids))] if self.has_entropy else None
            done = Completion(ids, [-rng.expovariate(1) for _ in ids], entropies=entropies)
            seen, said = f"you see {n}{self.text}", f"go {n}{self.text}"
            turns.append(Turn(prompt, done, 0.5, f"key {n}", observation=seen, text=said, images=self.images))
            prompt = [*prompt, *ids]
        return Trajectory(turns, Stop.DONE, 0.1, rng.random() < 0.5, last_observation=f"over{self.text}")


def _append(path: Path, row: dict) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


@contextmanager
def serving(root: Path, **options) -> Iterator[str]:
    """The address of a server of these runs, without a slash at its end."""
    from spear_rl.app.show.view.server import ViewServer

    with running(ViewServer(root, **options)) as server:
        yield server.address.partition("?")[0].rstrip("/")


@contextmanager
def running(server: Any) -> Iterator[Any]:
    """A server that answers."""
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    until = time.monotonic() + 30
    while not server.server.started and time.monotonic() < until:
        time.sleep(0.02)
    try:
        yield server
    finally:
        server.server.should_exit = True
        thread.join(30)
