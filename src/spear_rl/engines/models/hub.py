"""Models of the Hugging Face hub by id, through huggingface_hub: its cache, token, endpoint and offline mode."""

import contextlib
import hashlib
import io
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from spear_rl.engines.models.gguf import PIECE
from spear_rl.errors import ConfigError, DiskError, UserError
from spear_rl.io.cache import cache_folder, store, stored
from spear_rl.io.files import disk_reason, loading_reason

_REPO = re.compile(r"(?!.*(?:--|\.\.))[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9_][\w.-]{0,95})?", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
_REVISION = re.compile(r"(?!.*\.\.)\w[\w./-]{0,254}", re.ASCII)
_SHARD = re.compile(r"(?:\w[\w.-]*/)*\w[\w.-]*\.(?:safetensors|bin)", re.ASCII)
_GGUF = re.compile(r"(?!.*mmproj).*\.gguf", re.IGNORECASE)
_SPLIT = re.compile(r"-\d{5}(-of-\d{5}\.gguf)$", re.IGNORECASE)
_FIRST = r"-00001\1"
_TAGGED = re.compile(r"(?:hf:)?(?P<repo>[^:@]+/[^:@]+):(?P<tag>[\w.-]+)(?:@.*)?", re.ASCII)

SMALL = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Configuration and tokenizer; weights come after a look at them."""
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Files of weights in the order of preference; the shards of each are named by an index, and come before it."""
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")

_PROXY = re.compile(r"(?:https?|all)_proxy", re.IGNORECASE)
_NO_HUB = (json.JSONDecodeError, LookupError, AttributeError, TypeError)
"""What huggingface_hub raises where an answer is no hub's."""

_WAITS = ("connect", "read", "write", "pool")
LARGE = 1_000_000
"""Bytes of downloads whose progress is worth a line."""

_commits: dict[str, str] = {}
"""Model, as `HubId` prints it, -> the commit that this process uses."""


@dataclass(frozen=True, slots=True)
class HubId:
    """A repository of the hub, a revision of it (empty: its main branch), and a GGUF file in it, if one is named."""

    repo: str
    revision: str = ""
    file: str = ""

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" if self.revision else self.repo

    @property
    def model(self) -> str:
        """The name without the revision."""
        return f"{self.repo}/{self.file}" if self.file else self.repo


def hub_id(name: str, revision: str = "") -> HubId | None:
    """What a name says about the hub; None if it cannot be an id.

    "owner/name", "owner/name@v1.0", "owner/name/file.gguf", "gpt2", "hf:owner/name" (not the folder of that name)
    """
    plain, at, own = name.removeprefix("hf:").partition("@")
    parts, file = plain.split("/"), ""
    is_file = parts[-1].lower().endswith(".gguf") or PIECE.fullmatch(parts[-1])
    if len(parts) > 2 and is_file and all(part.strip(".") for part in parts):
        plain, file = "/".join(parts[:2]), "/".join(parts[2:])
    if not _REPO.fullmatch(plain) or plain.lower().endswith((".gguf", ".git")):
        return None
    if at and revision and own != revision:
        raise ConfigError(f"engine.revision={revision}: engine.model={name} says {own!r}: leave one of them out")
    chosen = own or revision
    if (at and not own) or (chosen and not _REVISION.fullmatch(chosen)):
        raise ConfigError(f"engine.revision cannot be {chosen!r}: it is a branch, a tag or a commit of the hub")
    return HubId(plain, chosen, file)


def pin(commits: Mapping[str, str]) -> None:
    """Use these commits (`used_commits` of an earlier process), and forget all others."""
    _commits.clear()
    _commits.update({name: commit for name, commit in commits.items() if COMMIT.fullmatch(str(commit))})


def used_commits() -> dict[str, str]:
    """Hub models that this process has used -> their commits."""
    return dict(_commits)


def fetched(model: HubId, *, with_weights: bool = True, with_code: bool = False) -> Path:
    """The local folder, or GGUF file, of a hub model; what the cache lacks is downloaded.

    Args:
        with_weights: False is enough for its configuration and tokenizer.
        with_code: Python files too.
    """
    if model.file:
        first, piece = _SPLIT.sub(_FIRST, model.file), PIECE.fullmatch(model.file)
        if model.file != first:
            raise ConfigError(f"engine.model: {model.model} is not the first of its parts: name {model.repo}/{first}")
        pattern = f"{piece['stem']}*" if piece else _SPLIT.sub(r"-*\1", model.file)
        file = _download(model, [pattern], nested=True) / model.file
        if not file.is_file():
            raise ConfigError(f"engine.model: {model.model} is no file of {model.repo} on the hub, or in the cache")
        return file
    folder = _download(model, [*SMALL, *(["*.py"] if with_code else [])])
    is_adapter, has_config = ((folder / name).is_file() for name in ("adapter_config.json", "config.json"))
    if not is_adapter and not (has_config and (folder / "tokenizer_config.json").is_file()):
        _refuse_gguf(model)
    if not is_adapter and not has_config:
        raise ConfigError(
            f"engine.model: {model} on the hub, or in the cache, is no transformers model: it has no config.json (of a "
            "repository with GGUF files name one: engine.model=owner/name/file.gguf)"
        )
    if not with_weights:
        return folder
    for names in [[name] for name in ADAPTER_WEIGHTS] if is_adapter else _weights(folder):
        _download(model, names, nested=True)
        if missing := [name for name in names if not (folder / name).is_file()]:
            if len(missing) < len(names):
                raise ConfigError(
                    f"engine.model: {model} on the hub, or in the cache, lacks {missing[0]}, which its index names"
                )
            continue
        return folder
    if not is_adapter:
        _refuse_gguf(model)
    raise ConfigError(f"engine.model: {model} on the hub, or in the cache, has no weights that transformers reads")


def _weights(folder: Path) -> Iterator[Sequence[str]]:
    """Names of files that are a model's weights, in the order of preference; an index that names others is ignored."""
    for whole in WEIGHTS:
        with contextlib.suppress(OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
            shards = set(json.loads((folder / f"{whole}.index.json").read_text("utf-8"))["weight_map"].values())
            if shards and all(_SHARD.fullmatch(name) for name in shards):
                yield sorted(shards)
        yield [whole]


def refuse_tag(name: str, revision: str = "") -> None:
    """Refuse "owner/name:Q4_K_M", by which other programs choose a GGUF file, and list the files that it may mean."""
    found = _TAGGED.fullmatch(name)
    model = hub_id(found["repo"], revision) if found else None
    if found and model:
        files = [file for file in _files(model) if _GGUF.fullmatch(file) and found["tag"].lower() in file.lower()]
        raise ConfigError(f"engine.model: {name} names no file: write owner/name/file.gguf{_such_as(model, files)}")


def _refuse_gguf(model: HubId) -> None:
    """Refuse a repository that holds only GGUF files, and list some of them, if the hub answers."""
    files = _files(model)
    if any(name.endswith(".safetensors") or "pytorch_model" in name for name in files):
        return
    if names := _such_as(model, filter(_GGUF.fullmatch, files)):
        raise ConfigError(f"engine.model: {model} on the hub holds only GGUF files: name one{names}")


def _files(model: HubId) -> list[str]:
    """The files of a repository; none if the hub does not answer: what comes next says what is wrong."""
    from huggingface_hub import HfApi

    with contextlib.suppress(Exception), _bounded_waits():
        return list(HfApi().list_repo_files(model.repo, revision=_commits.get(str(model)) or model.revision or None))
    return []


def _such_as(model: HubId, files: Iterable[str]) -> str:
    """Names of some GGUF files, each by its first part, as a user writes them."""
    revision = f"@{model.revision}" if model.revision else ""
    names = sorted({f"{model.repo}/{_SPLIT.sub(_FIRST, file)}{revision}" for file in files})
    return f", such as {', '.join(names[:4])}" if names else ""


def _download(model: HubId, patterns: Sequence[str], *, nested: bool = False) -> Path:
    """The snapshot's folder in the cache, with the files that match; new weights are checked against their hash."""
    from huggingface_hub import snapshot_download

    key = str(model)
    with _one_sentence(model), _shown_progress(), _bounded_waits():
        ignored = None if nested else ["*/*"]
        revision = _commits.get(key) or model.revision or None
        options: dict[str, Any] = {"allow_patterns": list(patterns), "ignore_patterns": ignored}
        options |= {"tqdm_class": _progress_lines(model), "library_name": "spear-rl"}
        folder = Path(snapshot_download(model.repo, revision=revision, **options))
    if COMMIT.fullmatch(folder.name):
        _commits[key] = folder.name
    for path in folder.rglob("*") if folder.is_dir() else ():
        name = str(path.relative_to(folder))
        is_large = name.endswith((".safetensors", ".bin")) or ".gguf" in name.lower()
        if is_large and any(fnmatch(name, pattern) for pattern in patterns):
            _check_hash(path, model)
    return folder


def _check_hash(path: Path, model: HubId) -> None:
    """Verify a download against its SHA-256, by which the cache names it; a file that differs is deleted and refused.

    Hashing takes seconds per 10 GB, so the size and mtime of a verified file are stored, and it is not hashed again.
    """
    blob = path.resolve()
    if not re.fullmatch(r"[0-9a-f]{64}", blob.name):
        return
    note = cache_folder() / "hashed" / f"{hashlib.sha256(str(blob).encode()).hexdigest()}.json"
    try:
        state = [blob.stat().st_size, blob.stat().st_mtime_ns]
        if stored(note) == state:
            return
        with blob.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:  # which loading meets too, and explains
        return
    if digest != blob.name:
        way_out = "and was deleted: give the command again"
        try:
            path.unlink()
            blob.unlink()
        except OSError as error:  # of a cache that others own
            way_out = f"and cannot be deleted ({disk_reason(error)}): set HF_HOME to another place"
        raise ConfigError(f"engine.model: {path.name} of {model} arrived damaged (its SHA-256 is wrong) {way_out}")
    store(note, state)


def _progress_lines(model: HubId) -> Any:
    """A class of progress bars for huggingface_hub that prints a line per tenth, and nothing without a terminal.

    A bar would be torn apart by the console's own display.
    """
    from huggingface_hub.utils import tqdm

    class Lines(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.tenth = -1
            has_terminal = sys.__stderr__ is not None and sys.__stderr__.isatty()  # the console replaces sys.stderr
            is_shown = has_terminal and str(options.get("desc")).startswith("Download")
            super().__init__(*arguments, **(options | {"file": io.StringIO(), "disable": not is_shown}))

        def display(self, *_: Any, **__: Any) -> bool:
            tenth = int(10 * self.n / self.total) if self.total and self.total >= LARGE else -1
            if tenth > self.tenth:
                self.tenth = tenth
                print(f"downloading {model}: {self.n / 1e6:,.0f} of {self.total / 1e6:,.0f} MB", file=sys.stderr)
            return True

    return Lines


@contextlib.contextmanager
def _shown_progress() -> Iterator[None]:
    """Show download progress, which loading turns off, and hide huggingface_hub's warnings: errors say the same."""
    from huggingface_hub import constants
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    log, were_off = logging.getLogger("huggingface_hub"), are_progress_bars_disabled()
    level = log.level
    log.setLevel(logging.ERROR)
    may_change = were_off and constants.HF_HUB_DISABLE_PROGRESS_BARS is None
    if may_change:
        enable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="huggingface_hub")
            yield
    finally:
        log.setLevel(level)
        if may_change:
            disable_progress_bars()


@contextlib.contextmanager
def _bounded_waits() -> Iterator[None]:
    """Give up on a server that does not answer: some requests of huggingface_hub would wait for ever."""
    from huggingface_hub import constants, get_session

    def bound(request: Any) -> None:
        limits = request.extensions.get("timeout", {})
        limit = constants.HF_HUB_DOWNLOAD_TIMEOUT
        request.extensions["timeout"] = {kind: limits.get(kind) or limit for kind in _WAITS}

    session = get_session()
    hooks = getattr(session, "event_hooks", None)  # of versions with another HTTP client there are none
    if hooks is None:
        yield
        return
    session.event_hooks = hooks | {"request": [*hooks.get("request", ()), bound]}
    try:
        yield
    finally:
        session.event_hooks = hooks


@contextlib.contextmanager
def _one_sentence(model: HubId) -> Iterator[None]:
    try:
        yield
    except (UserError, KeyboardInterrupt):
        raise
    except Exception as error:  # of huggingface_hub, its HTTP client, hf_xet, or the disk
        raise _explained(error, model) from error


def _explained(error: BaseException, model: HubId) -> UserError:
    """The sentence for what huggingface_hub raised."""
    from huggingface_hub import constants, errors, get_token

    start, hub = f"engine.model: {model}", constants.ENDPOINT
    proxies = ", ".join(name for name in sorted(os.environ) if _PROXY.fullmatch(name) and os.environ[name])
    proxy = f" and the proxy ({proxies})" if proxies else ""
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, errors.HfHubHTTPError):
        error = error.__cause__
    try:
        has_token = bool(get_token())
    except (OSError, UnicodeError) as refused:
        reason = disk_reason(refused) or "it is no text"
        way = "set HF_TOKEN, or HF_HOME to another place"
        return ConfigError(f"{start}: the stored token, {constants.HF_TOKEN_PATH}, cannot be read ({reason}): {way}")
    if isinstance(error, errors.GatedRepoError):
        way = "the token's account must be allowed" if has_token else "then log in (hf auth login) or set HF_TOKEN"
        return ConfigError(f"{start} is gated: accept its terms at {hub}/{model.repo}, {way}")
    if isinstance(error, errors.RevisionNotFoundError):
        return ConfigError(f"{start}: the hub has no such revision: engine.revision is a branch, a tag or a commit")
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 0
    if isinstance(error, errors.RepositoryNotFoundError) or status == 404:
        private = "the token may not read it" if has_token else "it needs a token (hf auth login, or HF_TOKEN)"
        return ConfigError(f"{start} is no folder here and no model of the hub ({hub}), or it is private and {private}")
    if status in (401, 403) and not has_token:
        way = "set HF_TOKEN, or log in (hf auth login)"
        return ConfigError(f"{start}: the hub forbids access without a token ({status}): {way}")
    if status == 401:
        return ConfigError(f"{start}: the hub refuses the token (401): set HF_TOKEN to a valid one, or log in again")
    if status == 403:
        return ConfigError(f"{start}: the hub forbids access (403): the token lacks the permission to read it")
    if status:
        way = "try again later" if status in (408, 429) or status >= 500 else f"check HF_ENDPOINT{proxy}"
        return ConfigError(f"{start}: the hub ({hub}) answered with status {status}: {way}")
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        if constants.is_offline_mode() if hasattr(constants, "is_offline_mode") else constants.HF_HUB_OFFLINE:
            place = constants.HF_HUB_CACHE
            return ConfigError(f"{start} is no folder here, and not, or not whole, in {place}: unset HF_HUB_OFFLINE")
        missing = f"{start} is no folder here and not, or not whole, in the cache"
        cause = f" ({loading_reason(error.__cause__)})" if error.__cause__ else ""
        return ConfigError(f"{missing}, and the hub ({hub}) cannot be reached: check the network{proxy}{cause}")
    reason = loading_reason(error)
    if isinstance(error, UnicodeEncodeError):
        return ConfigError(f"{start}: HF_TOKEN, or the stored token, holds characters that no token has: set it anew")
    if isinstance(error, OSError) and error.errno:
        place = f"{constants.HF_HUB_CACHE} (set HF_HOME to another place)"
        return DiskError(f"the download of {model} cannot be written to {place}: {disk_reason(error)}")
    if isinstance(error, errors.HFValidationError):
        return ConfigError(f"{start} cannot be a name of the hub: {reason}")
    if proxies and "proxy" in reason.lower():
        return ConfigError(f"{start}: the proxy cannot be used ({reason}): correct or unset {proxies}")
    if isinstance(error, _NO_HUB) or type(error).__name__ in ("UnsupportedProtocol", "InvalidURL"):
        way = f"set HF_ENDPOINT to the hub's address, or log in to the network{proxy and ', or check'}{proxy[4:]}"
        return ConfigError(f"{start}: {hub or repr(hub)} does not answer as a hub ({reason}): {way}")
    return ConfigError(f"{start}: the download broke off ({reason}): give the command again, whole files are kept")
