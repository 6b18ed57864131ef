"""Where metrics go: files, TensorBoard, and the optional services, by name. Never imports torch.

A tracker is a callback. Its factory is called once, when a run starts or resumes, with a `RunInfo`; a user's own is
given as `package.module:function`.
"""

import contextlib
import importlib
import logging
import netrc
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from spear_rl.errors import ConfigError, MissingExtraError
from spear_rl.io.escaping import in_words
from spear_rl.io.files import same_folder
from spear_rl.settings.names import loaded
from spear_rl.settings.ranges import nearest
from spear_rl.train.callbacks import Callback, Event, JsonLines, TensorBoard, scalars

PROJECT = "spear-rl"


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What a tracker is given about its run."""

    dir: Path
    name: str
    config: Mapping[str, Any]
    """Dotted name of a setting -> its value."""
    about: Mapping[str, str]
    """Dotted name -> version of a package, platform, and git state."""
    ids: dict[str, str] = field(default_factory=dict)
    """Tracker -> its id of this run: stored with the run, so that a resumed run continues it."""

    def id_of(self, tracker: str) -> str:
        return self.ids.setdefault(tracker, uuid.uuid4().hex)


TrackerFactory = Callable[[RunInfo], Callback]


def jsonl(run: RunInfo) -> Callback:
    """metrics.jsonl and eval.jsonl, which `resume`, `show` and `compare` read."""
    files = [JsonLines(run.dir / "metrics.jsonl", "step"), JsonLines(run.dir / "eval.jsonl", "eval")]

    def write(event: Event) -> None:
        for file in files:
            file(event)

    return write


def tensorboard(run: RunInfo) -> Callback:
    return TensorBoard(run.dir / "tensorboard")


def wandb(run: RunInfo) -> Callback:
    """Weights & Biases; offline, in the run folder, unless WANDB_MODE is set or there is an API key."""
    import wandb as client

    decided = "WANDB_MODE" in os.environ or _has_wandb_key()
    started = client.init(
        project=os.environ.get("WANDB_PROJECT") or PROJECT,
        name=run.name,
        config={**run.config, **run.about},
        dir=str(run.dir),
        id=run.id_of("wandb"),
        resume="allow",
        mode=None if decided else "offline",
    )
    return _Service(started.log, lambda failed: started.finish(exit_code=1) if failed else started.finish())


def trackio(run: RunInfo) -> Callback:
    """Trackio's local database; a run is continued by its name, which therefore ends in a random id."""
    import trackio as client

    run.ids.setdefault("trackio", f"{run.name}-{uuid.uuid4().hex[:8]}")
    client.init(project=PROJECT, name=run.ids["trackio"], config={**run.config, **run.about}, resume="allow")
    return _Service(client.log, lambda _: client.finish())


def mlflow(run: RunInfo) -> Callback:
    """MLflow; in the run folder unless MLFLOW_TRACKING_URI is set."""
    import mlflow as client

    if not os.environ.get("MLFLOW_TRACKING_URI"):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # the only store that needs no database
        client.set_tracking_uri((run.dir / "mlflow").absolute().as_uri())
    if known := run.ids.get("mlflow"):
        client.start_run(run_id=known)
    else:
        run.ids["mlflow"] = client.start_run(run_name=run.name).info.run_id
        # A parameter cannot change, so those of the first start stay; MLflow takes at most 100 per call.
        parameters = [(name, str(value)[:500]) for name, value in {**run.config, **run.about}.items()]
        for first in range(0, len(parameters), 100):
            client.log_params(dict(parameters[first : first + 100]))
    return _Service(client.log_metrics, lambda failed: client.end_run("FAILED" if failed else "FINISHED"))


TRACKERS: dict[str, TrackerFactory] = {
    "jsonl": jsonl, "tensorboard": tensorboard, "wandb": wandb, "trackio": trackio, "mlflow": mlflow,
}  # fmt: skip
"""Name -> factory; each but jsonl needs the Python package of the same name."""


class _Service:
    """Logs the numbers of an event with its step; finishes when the run ends."""

    def __init__(self, log: Callable[..., object], finish: Callable[[bool], object]) -> None:
        self._log, self._finish = log, finish

    def __call__(self, event: Event) -> None:
        if values := scalars(event):
            self._log(values, step=event.step)
        if event.kind == "end":
            self._finish(bool(event.text))


class Trackers:
    """The trackers of a run as one callback. One that raises is dropped with a note; only jsonl may stop a run.

    Args:
        names: of `run.trackers`; a missing package or an unknown name is refused here, before anything is written.
        others: callbacks to send notes to.
    """

    def __init__(self, names: Sequence[str], others: Sequence[Callback] = ()) -> None:
        if "jsonl" not in names:
            raise ConfigError("run.trackers must have jsonl: resume, show and compare read the files that it writes")
        if len(set(names)) < len(names):
            raise ConfigError("run.trackers names a tracker twice: leave one out")
        self._factories = {name: _factory(name) for name in sorted(names, key=lambda name: name != "jsonl")}
        self._others = others
        self._started: dict[str, Callback] = {}

    @contextlib.contextmanager
    def tracking(self) -> Iterator[None]:
        """Tell the trackers when the run fails; `start` is called in the body."""
        try:
            yield
        except BaseException as error:
            with contextlib.suppress(Exception):
                self(Event("end", 0, text=in_words(error)))
            raise

    def start(self, run: RunInfo) -> None:
        for name, factory in self._factories.items():
            with self._guarded(name, 0):
                tracker = factory(run)
                if not callable(tracker):
                    raise TypeError(f"it returned {type(tracker).__name__}, not a function of an event")
                self._started[name] = tracker

    def __call__(self, event: Event) -> None:
        for name, tracker in list(self._started.items()):
            with self._guarded(name, event.step):
                tracker(event if event.metrics is None else replace(event, metrics=dict(event.metrics)))
        if event.kind == "end":
            self._started.clear()

    @contextlib.contextmanager
    def _guarded(self, name: str, step: int) -> Iterator[None]:
        try:
            with same_folder():
                yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also SystemExit, which would end the run as if all were well
            if name == "jsonl":
                raise
            self._started.pop(name, None)
            text = f"run.trackers: {name} raised {in_words(error)}; the run continues without it"
            for other in self._others:
                other(Event("note", step, text=text))
            if not self._others:
                logging.getLogger(__name__).warning(text)


def _factory(name: str) -> TrackerFactory:
    if name not in TRACKERS and ":" not in name:
        known = f"it is one of: {', '.join(TRACKERS)}; or your own: package.module:function"
        raise ConfigError(f"run.trackers cannot have {name!r}{nearest(name, TRACKERS)}; {known}")
    try:
        if name not in TRACKERS:
            found: TrackerFactory = loaded(name, kind="tracker", example="my_tracker:start")
            return found
        if name != "jsonl":
            importlib.import_module(name)
    except ConfigError as error:
        raise ConfigError(f"run.trackers: {error}") from error
    except Exception as error:  # a package can also fail in its own code
        fault = f"{name} cannot be imported: pip install {name}, or leave it out ({in_words(error)})"
        raise MissingExtraError(f"run.trackers: {fault}") from error
    return TRACKERS[name]


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("://")[2].partition("/")[0]
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
