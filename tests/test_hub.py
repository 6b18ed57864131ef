"""Models of the hub, from a local server: found, downloaded once, the same as elsewhere; or one sentence why not."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from local_hub import Hub, serving
from spear_rl.engines.models import hub as hub_module
from spear_rl.engines.models.hub import HubId, fetched, hub_id, pin, used_commits
from spear_rl.engines.models.load import is_function, model_by_name
from spear_rl.engines.models.tiny import tiny_model
from spear_rl.errors import ConfigError, DiskError, MissingExtraError, UserError

IDS = torch.tensor([[5, 6, 7, 80, 9, 261]])


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that this process asks, with a cache of its own and no token."""
    from huggingface_hub import constants

    with serving(Hub()) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        template = "{endpoint}/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template.replace("{endpoint}", hub.address))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setenv("SPEAR_RL_CACHE", str(tmp_path / "cache"))
        pin({})
        yield hub
        pin({})


@pytest.fixture
def folder(tmp_path, tokenizer) -> Path:
    return saved(tmp_path / "folder", tokenizer, seed=3)


def saved(folder: Path, tokenizer, seed: int, **options: object) -> Path:
    tiny_model("tiny-xs", tokenizer, seed=seed).save_pretrained(folder, **options)
    tokenizer.save_pretrained(folder)
    return folder


def loaded(name: object, **options: object):
    return model_by_name(str(name), texts=list, seed=0, **options)[0]


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def plain(folder: Path) -> torch.Tensor:
    """What transformers alone makes of a folder."""
    from transformers import AutoModelForCausalLM

    return logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def test_a_hub_id_gives_the_logits_of_plain_transformers_and_is_downloaded_once(hub, folder):
    commit = hub.add("owner/name", folder)
    assert torch.equal(logits(loaded("owner/name")), plain(folder))
    assert used_commits() == {"owner/name": commit}
    before = hub.downloads()
    assert "model.safetensors" in before
    assert torch.equal(logits(loaded("hf:owner/name")), plain(folder))
    assert hub.downloads() == before


def test_only_what_is_needed_is_downloaded(hub, folder):
    (folder / "pytorch_model.bin").write_bytes(b"the same in another format")
    (folder / "consolidated.safetensors").write_bytes(b"the same in another format")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_bytes(b"the same in another format")
    (folder / "modeling_own.py").write_text("raise SystemExit")
    hub.add("owner/name", folder)
    loaded("owner/name")
    assert {name for name in hub.downloads() if not name.endswith((".json", ".jinja"))} == {"model.safetensors"}


def test_shards_are_found_by_their_index(hub, tmp_path, tokenizer):
    folder = saved(tmp_path / "shards", tokenizer, seed=4, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    hub.add("owner/shards", folder)
    assert torch.equal(logits(loaded("owner/shards")), plain(folder))
    [*_, last] = sorted(folder.glob("*.safetensors"))
    last.unlink()
    hub.add("owner/broken", folder)
    with pytest.raises(ConfigError, match=f"lacks {last.name}"):
        loaded("owner/broken")


def test_weights_in_torchs_format_load_safely_where_there_are_no_others(hub, tmp_path, tokenizer):
    folder = saved(tmp_path / "bin", tokenizer, seed=4)
    model = tiny_model("tiny-xs", tokenizer, seed=4)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    hub.add("owner/bin", folder)
    assert torch.equal(logits(loaded("owner/bin")), logits(model))


def test_a_whole_file_of_safetensors_comes_before_the_shards_of_torchs_format(hub, folder):
    shard = "pytorch_model-00001-of-00001.bin"
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    (folder / shard).write_bytes(b"the same in another format")
    hub.add("owner/name", folder)
    assert torch.equal(logits(loaded("owner/name")), plain(folder))
    assert [name for name in hub.downloads() if name.endswith((".bin", ".safetensors"))] == ["model.safetensors"]


@pytest.mark.parametrize("named", ["*", "*.py", "../a.safetensors", "/etc/a.safetensors", "a/../b.bin", ".x.bin"])
def test_an_index_that_names_no_weights_downloads_nothing(hub, folder, named):
    (folder / "own.py").write_text("raise SystemExit")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": named}}))
    hub.add("owner/name", folder)
    assert torch.equal(logits(loaded("owner/name")), plain(folder))
    assert "own.py" not in hub.downloads()


def test_weights_in_a_subfolder_that_the_index_names_are_found_and_checked(hub, tmp_path, tokenizer):
    folder = saved(tmp_path / "shards", tokenizer, seed=4, max_shard_size="100KB")
    expected = plain(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    (folder / "sub").mkdir()
    for file in folder.glob("model-*"):
        file.rename(folder / "sub" / file.name)
    index["weight_map"] = {name: f"sub/{file}" for name, file in index["weight_map"].items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    hub.add("owner/name", folder)
    assert torch.equal(logits(loaded("owner/name")), expected)
    hub.add("owner/other", folder)
    hub.faults["owner/other"] = "damaged"
    with pytest.raises(ConfigError, match="of owner/other arrived damaged"):
        loaded("owner/other")


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub, tmp_path, tokenizer):
    old, new = (saved(tmp_path / f"seed{seed}", tokenizer, seed=seed) for seed in (1, 2))
    commit = hub.add("owner/name", old, "v1.0")
    hub.add("owner/name", new)
    for name, options in (
        ("owner/name", {"revision": "v1.0"}),
        ("owner/name@v1.0", {}),
        ("owner/name@v1.0", {"revision": "v1.0"}),
        (f"owner/name@{commit}", {}),
    ):
        assert torch.equal(logits(loaded(name, **options)), plain(old))
    assert torch.equal(logits(loaded("owner/name")), plain(new))
    with pytest.raises(ConfigError, match="no such revision"):
        loaded("owner/name", revision="v2.0")
    with pytest.raises(ConfigError, match="leave one of them out"):
        loaded("owner/name@v1.0", revision="main")


def test_a_recorded_commit_is_used_again_after_the_branch_has_moved(hub, tmp_path, tokenizer):
    old, new = (saved(tmp_path / f"seed{seed}", tokenizer, seed=seed) for seed in (1, 2))
    hub.add("owner/name", old)
    loaded("owner/name")
    record = used_commits()
    hub.add("owner/name", new)
    pin(record)
    assert torch.equal(logits(loaded("owner/name")), plain(old))
    pin({})
    assert torch.equal(logits(loaded("owner/name")), plain(new))


def test_a_legacy_name_without_an_owner_is_found(hub, folder):
    hub.add("gpt2", folder)
    assert torch.equal(logits(loaded("gpt2")), plain(folder))


def test_a_folder_comes_before_the_hub_unless_the_name_says_so(hub, tmp_path, folder, tokenizer, monkeypatch):
    hub.add("owner/name", folder)
    other = saved(tmp_path / "owner" / "name", tokenizer, seed=8)
    monkeypatch.chdir(tmp_path)
    assert torch.equal(logits(loaded("owner/name")), plain(other))
    assert not hub.requests
    assert torch.equal(logits(loaded("hf:owner/name")), plain(folder))
    with pytest.raises(ConfigError, match=r"engine.revision=v1: .* is on this disk"):
        loaded("owner/name", revision="v1")


def adapter_of(base: str, place: Path, tokenizer, revision: str | None = None) -> torch.Tensor:
    """An adapter with random weights on the model of seed 3; the logits of the two by peft itself."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(tiny_model("tiny-xs", tokenizer, seed=3), config)
    config.base_model_name_or_path, config.revision = base, revision
    model.save_pretrained(place, save_embedding_layers=False)
    return logits(model)


@pytest.mark.parametrize("where", ["folder", "hub"])
@pytest.mark.parametrize("base", ["folder", "hub"])
def test_an_adapter_finds_its_base_wherever_either_is(hub, folder, tmp_path, tokenizer, where, base):
    commit = hub.add("owner/base", folder)
    hub.add("owner/base", saved(tmp_path / "newer", tokenizer, seed=9))
    own = tmp_path / "adapter"
    base_name = str(folder) if base == "folder" else "owner/base"
    expected = adapter_of(base_name, own, tokenizer, commit if base == "hub" else None)
    hub.add("owner/adapter", own)
    got = logits(loaded("owner/adapter" if where == "hub" else own))
    assert torch.allclose(got, expected, atol=1e-5)
    assert not torch.allclose(got, plain(folder), atol=1e-2)


@pytest.mark.parametrize("revision", ["commit", "main"])
def test_a_base_with_a_commit_is_of_the_hub_also_where_a_folder_has_its_name(
    hub, folder, tmp_path, tokenizer, monkeypatch, revision
):
    from spear_rl.app.doctor import empty_model

    commit = hub.add("owner/base", folder)
    wider = tiny_model("tiny", tokenizer, seed=3)
    is_commit = revision == "commit"
    expected = adapter_of("owner/base", tmp_path / "adapter", tokenizer, commit if is_commit else revision)
    monkeypatch.chdir(tmp_path)
    wider.save_pretrained("owner/base")
    tokenizer.save_pretrained("owner/base")
    width = empty_model("adapter").config.hidden_size
    assert width == (64 if is_commit else 96), "a commit is the hub's; any other revision says nothing of a folder"
    if is_commit:
        assert torch.allclose(logits(loaded("adapter")), expected, atol=1e-5)


def test_an_adapter_without_its_base_says_so(hub, tmp_path, tokenizer):
    adapter_of("owner/gone", tmp_path / "adapter", tokenizer)
    with pytest.raises(ConfigError, match=r"needs its base model owner/gone: .*no model of the hub"):
        loaded(tmp_path / "adapter")
    adapter_of(str(tmp_path / "moved"), tmp_path / "left", tokenizer)
    with pytest.raises(ConfigError, match=r"if it was moved, correct base_model_name_or_path in adapter_config.json$"):
        loaded(tmp_path / "left")
    adapter_of("owner/circle", tmp_path / "circle", tokenizer)
    hub.add("owner/circle", tmp_path / "circle")
    with pytest.raises(ConfigError, match="lies on itself"):
        loaded("owner/circle")


FAULTS = {
    "gated": r"is gated: accept its terms at .*/owner/name, then log in",
    "no_token": r"is gated: accept its terms",
    "private": r"is no folder here and no model of the hub .*, or it is private and it needs a token",
    "bad_token": r"the hub forbids access without a token \(401\): set HF_TOKEN, or log in",
    "403": r"the hub forbids access without a token \(403\): set HF_TOKEN, or log in",
    "404": r"no model of the hub",
    "407": r"answered with status 407: check HF_ENDPOINT",
    "503": r"answered with status 503: try again later",
    "gated_files": r"is gated: accept its terms",
    "damaged": r"model.safetensors of owner/name arrived damaged .* give the command again",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_hub_refuses_is_one_sentence(hub, folder, fault):
    hub.add("owner/name", folder)
    hub.faults["owner/name"] = fault
    with pytest.raises(ConfigError, match=FAULTS[fault]) as caught:
        loaded("owner/name")
    assert "\n" not in str(caught.value)
    hub.faults.clear()
    pin({})
    assert torch.equal(logits(loaded("owner/name")), plain(folder)), "afterwards all is well"


def test_weights_are_hashed_once_and_anew_when_they_change(hub, folder, monkeypatch):
    hashed = []

    def digest(file, kind):
        hashed.append(Path(file.name).name)
        return own(file, kind)

    own = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", digest)
    commit = hub.add("owner/name", folder)
    for name in ("owner/name", "owner/name", "owner/name@main", f"owner/name@{commit}"):
        pin({})
        loaded(name)
    assert len(hashed) == 1
    [snapshot] = (folder.parent / "hub-cache").rglob("model.safetensors")
    snapshot.resolve().write_bytes(snapshot.read_bytes()[:-1] + b"x")
    with pytest.raises(ConfigError, match="arrived damaged"):
        loaded("owner/name")
    assert len(hashed) == 2
    monkeypatch.setenv("SPEAR_RL_CACHE", "/dev/null/none")
    for _ in range(2):
        loaded("owner/name")
    assert len(hashed) == 4, "where nothing can be kept, weights are hashed at each start"


def test_weights_that_were_not_asked_for_are_not_hashed(hub, folder, monkeypatch):
    hub.add("owner/name", folder)
    loaded("owner/name")
    [snapshot] = (folder.parent / "hub-cache").rglob("model.safetensors")
    other = snapshot.resolve().with_name("0" * 64)
    other.write_bytes(b"another format")
    (snapshot.parent / "pytorch_model.bin").symlink_to(other)
    (snapshot.parent / "gone.safetensors").symlink_to(other.with_name("1" * 64))
    assert torch.equal(logits(loaded("owner/name")), plain(folder))


def test_a_damaged_file_in_a_cache_of_others_is_one_sentence(hub, folder, monkeypatch):
    def refused(path: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    hub.add("owner/name", folder)
    loaded("owner/name")
    [snapshot] = (folder.parent / "hub-cache").rglob("model.safetensors")
    snapshot.resolve().write_bytes(b"damaged")
    pin({})
    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(ConfigError, match=r"cannot be deleted \(Permission denied.*: set HF_HOME to another place"):
        loaded("owner/name")


def test_a_wrong_name_is_told_with_the_built_in_ones(hub):
    with pytest.raises(ConfigError, match=r"'tinny' is no folder and no built-in model; did you mean tiny\?"):
        loaded("tinny")
    with pytest.raises(ConfigError, match="owner/nothing is no folder here and no model of the hub"):
        loaded("owner/nothing")
    for name in ("./owner/name", "/no/such/folder", "owner/name/more", "owner/../name", "a b", "owner/", "x--y"):
        with pytest.raises(ConfigError, match="is no folder and no built-in model"):
            loaded(name)
    asked = {path.removeprefix("/api/models/") for _, path, _ in hub.requests if path.startswith("/api/models/")}
    assert {path.partition("/revision")[0] for path in asked} == {"tinny", "owner/nothing"}


@pytest.mark.parametrize("name", ["hf.co/owner/name", "huggingface.co/owner/name:Q4_K_M", "https://hf.co/owner/name"])
def test_an_address_is_told_how_to_be_a_name(hub, name):
    with pytest.raises(ConfigError, match=r"is an address: name a model of the hub by its id, owner/name, or a GGUF"):
        loaded(name)
    assert not is_function(name)
    assert not hub.requests


def test_a_kind_of_gguf_file_is_answered_with_the_files_it_may_mean(hub, tmp_path):
    names = ["a-Q4_K_M.gguf", "Q8/a-q8_0-00001-of-00002.gguf", "Q8/a-q8_0-00002-of-00002.gguf", "mmproj-Q8_0.gguf"]
    for name in names:
        (tmp_path / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "files" / name).write_bytes(b"GGUF")
    hub.add("owner/files", tmp_path / "files")
    start = "names no file: write owner/name/file.gguf"
    for name, said in (
        ("owner/files:Q4_K_M", f"{start}, such as owner/files/a-Q4_K_M.gguf$"),
        ("hf:owner/files:Q8_0", f"{start}, such as owner/files/Q8/a-q8_0-00001-of-00002.gguf$"),
        ("owner/files:latest", f"{start}$"),
        ("owner/none:Q4_K_M", f"{start}$"),
    ):
        assert not is_function(name)
        with pytest.raises(ConfigError, match=said):
            loaded(name)
    assert not hub.downloads()
    assert is_function("package.module:make")
    with pytest.raises(ConfigError, match=r"is not the first of its parts: name owner/files/Q8/a-q8_0-00001-of-00002"):
        loaded("owner/files/Q8/a-q8_0-00002-of-00002.gguf")
    assert not hub.downloads()


def test_a_home_folder_is_found_by_every_command(folder, tmp_path, monkeypatch):
    from spear_rl.app.config import load
    from spear_rl.app.doctor import empty_model
    from spear_rl.app.evaluate import EvalOptions, evaluate_from

    monkeypatch.setenv("HOME", str(tmp_path))
    assert torch.equal(logits(loaded("~/folder")), plain(folder))
    assert empty_model("~/folder").config.hidden_size == 64
    assert load(None, ["task.env=lookup", "engine.model=~/folder"]).engine.model == str(folder)
    report = evaluate_from("~/folder", ["task.env=lookup", "rollout.max_new_tokens=2"], EvalOptions(tasks=1))
    assert report.about["folder"] == str(folder)


def test_a_name_that_is_empty_too_long_or_of_a_missing_file_is_one_sentence(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "qwen").mkdir(parents=True)
    for name in ("", "x" * 5000):
        with pytest.raises(ConfigError, match="is no folder and no built-in model"):
            loaded(name)
    with pytest.raises(ConfigError, match=r"there is no file models/qwen/none.gguf"):
        loaded("models/qwen/none.gguf")
    with pytest.raises(ConfigError, match=r"is an address: name a model of the hub by its id, owner/name"):
        loaded("https://huggingface.co/owner/name")
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"run is a run's folder: name its model/ or one of its checkpoints/"):
        loaded("run")
    assert not hub.requests


def test_a_token_that_cannot_be_sent_is_one_sentence(hub, folder, monkeypatch):
    hub.add("owner/name", folder)
    monkeypatch.setenv("HF_TOKEN", "hf_s\u00e9cret")
    with pytest.raises(
        ConfigError, match="HF_TOKEN, or the stored token, holds characters that no token has"
    ) as caught:
        loaded("owner/name")
    assert "cret" not in str(caught.value)


def test_the_token_goes_to_the_hub(hub, folder, monkeypatch):
    hub.add("owner/name", folder)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    loaded("owner/name")
    assert {token for _, path, token in hub.requests if "owner/name" in path} == {"Bearer hf_secret"}
    hub.faults["owner/other"] = "gated"
    with pytest.raises(ConfigError, match="the token's account must be allowed") as caught:
        loaded("owner/other")
    assert "hf_secret" not in str(caught.value)
    for fault, said in (("bad_token", r"refuses the token \(401\)"), ("403", r"\(403\): the token lacks")):
        hub.faults["owner/other"] = fault
        with pytest.raises(ConfigError, match=said):
            loaded("owner/other")


@pytest.mark.parametrize("kind", ["folder", "binary", "beneath a file"])
def test_a_stored_token_that_cannot_be_read_is_one_sentence(hub, folder, tmp_path, monkeypatch, kind):
    from huggingface_hub import constants

    place = tmp_path / "token"
    if kind == "folder":
        place.mkdir()
    else:
        place.write_bytes(b"\xff\xfe")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(place / "token" if kind == "beneath a file" else place))
    hub.add("owner/name", folder)
    with pytest.raises(ConfigError, match=r"the stored token, .*, cannot be read \(.*\): set HF_TOKEN, or HF_HOME to"):
        loaded("owner/name")


def test_offline_a_cached_model_loads_and_another_does_not(hub, folder, monkeypatch):
    from huggingface_hub import constants

    hub.add("owner/name", folder)
    loaded("owner/name")
    asked = len(hub.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    pin({})
    assert torch.equal(logits(loaded("owner/name")), plain(folder))
    with pytest.raises(
        ConfigError, match=r"owner/other is no folder here, and not, or not whole, in .*: unset HF_HUB_OFFLINE"
    ):
        loaded("owner/other")
    assert len(hub.requests) == asked


def test_without_a_network_a_cached_model_loads_and_another_does_not(hub, folder, monkeypatch):
    from huggingface_hub import constants

    hub.add("owner/name", folder)
    loaded("owner/name")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    pin({})
    assert torch.equal(logits(loaded("owner/name")), plain(folder))
    with pytest.raises(
        ConfigError, match=r"the hub \(http://127.0.0.1:9\) cannot be reached: check the network \(.*refused\)$"
    ):
        loaded("owner/other")


@pytest.mark.parametrize("endpoint", ["portal", "no address"])
def test_a_server_that_is_no_hub_is_one_sentence(hub, monkeypatch, endpoint):
    from huggingface_hub import constants

    def page(*_: object, **__: object) -> None:
        raise json.JSONDecodeError("Expecting value", "<html>", 0)

    if endpoint == "portal":
        monkeypatch.setattr("huggingface_hub.snapshot_download", page)
    else:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    with pytest.raises(ConfigError, match=r"does not answer as a hub \(.*\): set HF_ENDPOINT to the hub's address"):
        loaded("owner/name")


@pytest.mark.parametrize("answer", [{}, [], None, {"id": "owner/name", "sha": "0" * 40, "siblings": [1]}])
def test_an_answer_that_is_no_hubs_is_one_sentence(hub, folder, monkeypatch, answer):
    hub.add("owner/name", folder)
    monkeypatch.setattr("local_hub.json.dumps", lambda _: str(answer).replace("'", '"').replace("None", "null"))
    with pytest.raises(ConfigError, match=r"does not answer as a hub \(.*\): set HF_ENDPOINT to the hub's address"):
        loaded("owner/name")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("socks5://127.0.0.1:9", r"the proxy cannot be used \(.*socksio.*\): correct or unset HTTP_PROXY$"),
        ("ftp://127.0.0.1:9", r"the proxy cannot be used \(.*\): correct or unset HTTP_PROXY$"),
        ("http://127.0.0.1:9", r"cannot be reached: check the network and the proxy \(HTTP_PROXY\) \(.*refused\)$"),
        ("http://[::1", r"does not answer as a hub \(.*\): .*, or check the proxy \(HTTP_PROXY\)$"),
    ],
)
def test_a_proxy_that_cannot_be_used_is_named(hub, monkeypatch, address, said):
    from huggingface_hub import close_session

    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("HTTP_PROXY", address)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    close_session()
    try:
        with pytest.raises(ConfigError, match=said):
            loaded("owner/name")
    finally:
        close_session()


def test_a_hub_that_never_answers_is_given_up(hub, folder, monkeypatch):
    import socket

    from huggingface_hub import constants

    hub.add("owner/name", folder)
    loaded("owner/name")
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        pin({})
        assert torch.equal(logits(loaded("owner/name")), plain(folder)), "what is in the cache loads"
        with pytest.raises(ConfigError, match=r"the hub .* cannot be reached: check the network"):
            loaded("owner/other")


def test_a_full_disk_is_one_sentence(hub, folder, monkeypatch, recwarn):
    from huggingface_hub import file_download

    def full(*_: object, **__: object) -> None:
        file_download._check_disk_space(1 << 60, folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    hub.add("owner/name", folder)
    monkeypatch.setattr(file_download, "http_get", full)
    with pytest.raises(DiskError, match=r"the download of owner/name cannot be written to .*: No space left on device"):
        loaded("owner/name")
    assert not list(recwarn), "huggingface_hub warns of it too"


def test_a_download_that_breaks_off_goes_on_the_next_time(hub, folder, monkeypatch):
    import time

    hub.add("owner/name", folder)
    hub.faults["owner/name"] = "cut_off"
    monkeypatch.setattr(time, "sleep", lambda _: None)  # between retries
    with pytest.raises(
        ConfigError, match=r"owner/name: the download broke off .*: give the command again, whole files"
    ):
        loaded("owner/name")
    hub.faults.clear()
    hub.requests.clear()
    assert torch.equal(logits(loaded("owner/name")), plain(folder))
    assert hub.downloads() == ["model.safetensors"]


def test_a_repository_that_cannot_be_trained_is_refused_before_its_weights_are_downloaded(hub, tmp_path, tokenizer):
    from transformers import BertConfig, BertModel, T5Config, T5ForConditionalGeneration

    shape = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    for name, model in (
        ("bert", BertModel(BertConfig(hidden_size=16, intermediate_size=16, **shape))),
        (
            "t5",
            T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)),
        ),
    ):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        hub.add(f"owner/{name}", tmp_path / name)
    with pytest.raises(ConfigError, match="owner/bert is a BertModel, which embeds or classifies text"):
        loaded("owner/bert")
    with pytest.raises(ConfigError, match=r"is an encoder-decoder \(T5ForConditionalGeneration\)"):
        loaded("owner/t5")
    assert "model.safetensors" not in hub.downloads()


def test_a_repository_without_tokenizer_weights_or_model_says_so(hub, tmp_path, tokenizer):
    mute = saved(tmp_path / "mute", tokenizer, seed=0)
    for file in mute.glob("*token*"):
        file.unlink()
    hub.add("owner/mute", mute)
    with pytest.raises(ConfigError, match=r"has no tokenizer: add tokenizer.json"):
        loaded("owner/mute")
    empty = saved(tmp_path / "empty", tokenizer, seed=0)
    (empty / "model.safetensors").unlink()
    hub.add("owner/empty", empty)
    with pytest.raises(ConfigError, match="has no weights that transformers reads"):
        loaded("owner/empty")
    (empty / "config.json").unlink()
    hub.add("owner/dataset", empty)
    with pytest.raises(ConfigError, match=r"it has no config.json"):
        loaded("owner/dataset")


def test_weights_that_lack_a_layer_are_not_filled_with_random_ones(tmp_path, tokenizer):
    from safetensors.torch import load_file, save_file

    folder = saved(tmp_path / "part", tokenizer, seed=0)
    weights = load_file(folder / "model.safetensors")
    weights.pop(next(name for name in weights if "layers.1" in name))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"no whole GPTNeoXForCausalLM: without .*layers.1"):
        loaded(folder)


def with_settings(folder: Path, **settings: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


def test_weights_of_another_shape_are_named_with_both_shapes(folder):
    shapes = r"has the shape \[\d+, 64\], and by its config.json \[\d+, 96\]"
    with pytest.raises(ConfigError, match=f"do not fit: .* {shapes}"):
        loaded(with_settings(folder, hidden_size=96))


@pytest.mark.parametrize(
    ("quantised", "method"),
    [
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "zzz"}, "zzz"),
        ({"load_in_8bit": True}, "by an unnamed method"),
    ],
)
def test_quantised_weights_are_refused_before_they_are_downloaded(hub, folder, quantised, method):
    from spear_rl.app.doctor import empty_model

    hub.add("owner/name", with_settings(folder, quantization_config=quantised))
    said = rf"is quantised \({method}\) and cannot be trained: name the unquantised model or a GGUF file$"
    for name in ("owner/name", str(folder)):
        for read in (loaded, empty_model):
            with pytest.raises(ConfigError, match=said):
                read(name)
    with pytest.raises(ConfigError, match=said):
        loaded("owner/name", trust_remote_code=True)
    assert "model.safetensors" not in hub.downloads()


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_quantised_weights_that_transformers_makes_plain_are_not_refused(folder, method):
    assert torch.equal(
        logits(loaded(with_settings(folder, quantization_config={"quant_method": method}))).bfloat16(),
        plain(folder).bfloat16(),
    )


def test_a_missing_package_is_named_by_its_own_sentence_unless_the_model_sees(folder, monkeypatch):
    from transformers import AutoTokenizer

    def missing(*_: object, **__: object) -> None:
        raise ImportError("\nThis tokenizer needs sentencepiece: pip install sentencepiece\nand more")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", missing)
    with pytest.raises(MissingExtraError, match=r"needs a package: This tokenizer needs .* install sentencepiece$"):
        loaded(folder)


def test_weights_that_hold_more_than_tensors_are_not_read_and_no_way_round_is_shown(folder):
    (folder / "model.safetensors").unlink()

    class Code:
        def __reduce__(self):
            return (os.system, ("exit 1",))

    torch.save({"weight": Code()}, folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"its weights in torch's format hold more than tensors and are not read$"):
        loaded(folder)


def test_a_head_that_differs_from_the_embeddings_is_not_tied_whatever_the_config_says(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("embed_in.weight"))
    weights["embed_out.weight"] = torch.randn_like(weights[name])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model = loaded(folder)
    assert not model.config.tie_word_embeddings
    before = logits(model)
    model.tie_weights()
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("owner/name", HubId("owner/name")),
        ("owner/name@refs/pr/4", HubId("owner/name", "refs/pr/4")),
        ("owner/name/q4.gguf", HubId("owner/name", "", "q4.gguf")),
        ("owner/name/sub/q4.GGUF@main", HubId("owner/name", "main", "sub/q4.GGUF")),
        ("gpt2", HubId("gpt2")),
        ("hf:gpt2", HubId("gpt2")),
        ("model.gguf", None),
        ("folder/model.gguf", None),
        ("../x", None),
        ("~/x", None),
        ("/x/y", None),
        ("x/y/", None),
        ("owner/name/../q4.gguf", None),
    ],
)
def test_names_of_the_hub(name, expected):
    assert hub_id(name) == expected


@pytest.mark.parametrize("revision", ["../../etc", "a b", "-x", "x" * 300, "\u00e9"])
def test_a_revision_is_checked(revision):
    with pytest.raises(ConfigError, match=r"engine.revision cannot be"):
        hub_id("owner/name", revision)


def test_hub_errors_of_any_kind_become_one_sentence(hub, monkeypatch):
    import huggingface_hub

    for error in (RuntimeError("line one\nline two"), ValueError(), httpx_error(), OSError("Consistency check failed")):

        def fail(*_: object, error=error, **__: object) -> None:
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(UserError) as caught:
            fetched(HubId("owner/name"))
        assert "\n" not in str(caught.value)


def httpx_error() -> Exception:
    from huggingface_hub import errors

    return errors.HFValidationError("not an id")


def settings(hub: Hub, tmp_path: Path) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return env | {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "COLUMNS": "300"}


def command(hub: Hub, tmp_path: Path, *arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "spear_rl.cli", *map(str, arguments)]
    return subprocess.run(
        command, env=settings(hub, tmp_path) | env, capture_output=True, text=True, timeout=600, cwd=tmp_path
    )


RUN = ["lookup", "engine.model=owner/name", "engine.lora_rank=2", "run.steps=2", "sft.episodes=0", "eval.tasks=0"]
RUN += ["rollout.num_tasks=2", "rollout.group_size=2", "rollout.max_new_tokens=4", "run.checkpoint_every=1"]


def test_a_gguf_file_of_the_hub_is_downloaded_with_its_parts_and_nothing_else(hub, tmp_path, monkeypatch):
    from test_gguf import in_parts, plain_model, tensors_of, write
    from test_gguf import logits as logits_of

    monkeypatch.setenv("SPEAR_RL_CACHE", str(tmp_path / "cache"))
    model, folder = plain_model("qwen2", tied=True), tmp_path / "files"
    parts = in_parts(folder / "sub", model)
    write(folder / "whole.gguf", "qwen2", tensors_of(model, "qwen2", head=False))
    whole, pieces = (folder / "whole.gguf").read_bytes(), ["cut.gguf-split-a", "cut.gguf-split-b"]
    (folder / pieces[0]).write_bytes(whole[:5000])
    (folder / pieces[1]).write_bytes(whole[5000:])
    hub.add("owner/files-GGUF", folder)
    for name, files in (
        ("whole.gguf", ["whole.gguf"]),
        (f"sub/{parts[0].name}", [part.name for part in parts]),
        (pieces[0], pieces),
    ):
        hub.requests.clear()
        own = model_by_name(f"owner/files-GGUF/{name}", texts=list, seed=0)[0]
        assert torch.allclose(logits_of(own), logits_of(model), atol=1e-5)
        assert sorted(hub.downloads()) == files
    with pytest.raises(ConfigError, match=r"owner/files-GGUF/none.gguf is no file of owner/files-GGUF"):
        loaded("owner/files-GGUF/none.gguf")
    with monkeypatch.context() as offline:
        offline.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(ConfigError, match=r"none.gguf is no file of owner/files-GGUF on the hub, or in the cache$"):
            loaded("owner/files-GGUF/none.gguf")
        with pytest.raises(
            ConfigError, match=r"owner/files-GGUF on the hub, or in the cache, is no transformers model"
        ):
            loaded("owner/files-GGUF")
    (folder / "mmproj-F16.gguf").write_bytes(b"GGUF of a vision tower")
    model.config.save_pretrained(folder)  # as many repositories of GGUF files have it
    hub.add("owner/with-config", folder)
    for name in ("files-GGUF", "with-config"):
        hub.requests.clear()
        said = rf"holds only GGUF files: name one, such as owner/{name}/sub/{parts[0].name}, owner/{name}/whole.gguf$"
        with pytest.raises(ConfigError, match=said):
            loaded(f"owner/{name}")
        assert not [file for file in hub.downloads() if file.endswith(".gguf")]


def test_a_resume_uses_the_commit_in_the_runs_record(hub, tmp_path, tokenizer):
    from spear_rl.app.build.training import engine_of
    from spear_rl.app.config import load

    old, new = (saved(tmp_path / f"seed{seed}", tokenizer, seed=seed) for seed in (1, 2))
    commit = hub.add("owner/name", old)
    hub.add("owner/name", new)
    (tmp_path / "run.json").write_text(json.dumps({"starts": [], "trackers": {}, "models": {"owner/name": commit}}))
    config = load(None, ["task.env=lookup", "engine.model=owner/name", f"run.dir={tmp_path}", "run.threads=1"])
    for resume, folder in ((True, old), (False, new)):
        config.run.resume = resume
        engine = engine_of(config)
        assert torch.equal(logits(engine.model), plain(folder))


@pytest.mark.slow
def test_a_run_of_a_hub_model_records_its_commit_and_resumes_on_the_same_weights(hub, tmp_path, tokenizer):
    old, new = (saved(tmp_path / f"seed{seed}", tokenizer, seed=seed) for seed in (1, 2))
    commit = hub.add("owner/name", old)
    begun = command(hub, tmp_path, "train", *RUN, "run.dir=run")
    assert begun.returncode == 0, begun.stdout + begun.stderr
    assert not re.search("Fetching|downloading", begun.stderr), "no progress where there is no terminal"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["models"] == {"owner/name": commit}
    shown = command(hub, tmp_path, "show", "run")
    assert f"model owner/name of the hub, commit {commit}" in shown.stdout
    hub.add("owner/name", new)
    [*_, last] = sorted((tmp_path / "run" / "checkpoints").iterdir())
    adapter = json.loads((last / "adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == ("owner/name", commit)
    shutil.rmtree(tmp_path / "home")
    resumed = command(hub, tmp_path, "train", "run.dir=run", "run.resume=true", "run.steps=3")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    weights = list((tmp_path / "home").rglob("model.safetensors"))
    assert [path.parent.name for path in weights] == [commit]
    changed = command(hub, tmp_path, "train", "run.dir=run", "run.resume=true", "run.steps=4", "engine.revision=main")
    assert changed.returncode == 2
    assert "engine.revision=main: the run began with" in changed.stderr + changed.stdout


@pytest.mark.slow
def test_a_terminal_shows_the_progress_of_a_download(hub, folder, tmp_path):
    import pty

    (folder / "tokenizer.model").write_bytes(bytes(3_000_000))
    hub.add("owner/name", folder)
    front, back = pty.openpty()
    small = ["--env", "lookup", "--tasks", "1", "--set", "rollout.max_new_tokens=2"]
    command = [sys.executable, "-m", "spear_rl.cli", "eval", "owner/name", *small]
    process = subprocess.Popen(command, env=settings(hub, tmp_path), stdout=back, stderr=back, cwd=tmp_path)
    os.close(back)
    said = b""
    with open(front, "rb", buffering=0) as terminal, suppress(OSError):  # which ends a terminal's output
        while block := terminal.read(4096):
            said += block
    assert process.wait() == 0, said.decode(errors="replace")
    assert re.search(rb"downloading owner/name: \d+ of \d+ MB", said)


@pytest.mark.slow
def test_a_disk_that_fills_during_the_download_is_one_sentence(hub, folder, tmp_path):
    hub.add("owner/name", folder)
    size = (folder / "model.safetensors").stat().st_size
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size // 2}, {size // 2})); "
    code = f"{limited}import sys; sys.argv = ['spear', 'eval', 'owner/name', '--env', 'lookup']; "
    code += "from spear_rl.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", code], env=settings(hub, tmp_path), capture_output=True, text=True, cwd=tmp_path
    )
    assert ended.returncode == 2, ended.stderr
    assert "the download of owner/name cannot be written to" in ended.stderr + ended.stdout
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_commands_refuse_in_one_sentence_with_exit_code_2(hub, tmp_path):
    hub.faults["owner/name"] = "gated"
    for arguments, env, expected in (
        (("doctor", "engine.model=owner/name"), {}, "is gated"),
        (("eval", "owner/none", "--env", "lookup"), {}, "no model of the hub"),
        (("train", "lookup", "engine.model=owner/none", "run.dir=x"), {"HF_HUB_OFFLINE": "1"}, "unset HF_HUB_OFFLINE"),
        (("train", "lookup", "engine.model=owner/none", "run.dir=x"), {"HF_ENDPOINT": "http://127.0.0.1:9"}, "reached"),
    ):
        ended = command(hub, tmp_path, *arguments, **env)
        said = ended.stdout + ended.stderr
        assert ended.returncode == 2, said
        assert expected in said
        assert "Traceback" not in said
        assert not (tmp_path / "x" / "config.toml").exists()


def test_the_commits_of_a_damaged_record_are_ignored(tmp_path):
    from spear_rl.io.record import read_record

    (tmp_path / "run.json").write_text(
        '{"starts": [], "trackers": {}, "models": {"a/b": "../../x", "c/d": "%s"}}' % ("0" * 40)
    )
    assert read_record(tmp_path)["models"] == {"c/d": "0" * 40}
    assert hub_module._commits is not read_record(tmp_path)


def test_an_adapters_own_chat_template_is_used(hub, folder, tmp_path, tokenizer):
    import copy

    hub.add("owner/base", folder)
    own = copy.deepcopy(tokenizer)
    own.chat_template = "{% for m in messages %}{{ m['content'] + '<|end|>' }}{% endfor %}"
    adapter_of("owner/base", tmp_path / "adapter", tokenizer)
    assert model_by_name(str(tmp_path / "adapter"), texts=list, seed=0)[1].chat_template == tokenizer.chat_template
    own.save_pretrained(tmp_path / "adapter")
    assert model_by_name(str(tmp_path / "adapter"), texts=list, seed=0)[1].chat_template == own.chat_template


def test_verl_is_given_the_folder_of_a_revision_and_the_id_of_any_other_model(hub, folder, tmp_path):
    from spear_rl.app.config import load
    from spear_rl.integrations.verl.launch import verl_settings

    commit = hub.add("owner/name", folder, "v1.0")
    hub.add("owner/name", folder)
    paths = []
    for overrides in (["engine.model=owner/name"], ["engine.model=owner/name", "engine.revision=v1.0"]):
        config = load("paper-alfworld", [*overrides, "sft.episodes=0"])
        keys = verl_settings(config, tmp_path, {"trainer.n_gpus_per_node": 1, "trainer.nnodes": 1})
        paths.append(keys["actor_rollout_ref.model.path"])
    assert paths[0] == "owner/name"
    assert Path(paths[1]).name == commit
    assert torch.equal(logits(loaded(paths[1])), plain(folder))
    with pytest.raises(ConfigError, match="verl wants a transformers folder"):
        verl_settings(load("paper-alfworld", ["engine.model=a/b/c.gguf", "sft.episodes=0"]), tmp_path, {})


@pytest.mark.parametrize("model", ["tiny-xs", "smollm2", "outside_package.model:make"])
def test_a_revision_of_what_is_not_on_the_hub_is_refused(model):
    from spear_rl.app.build.training import engine_of
    from spear_rl.app.config import load

    config = load(None, ["task.env=lookup", f"engine.model={model}", "engine.revision=v1", "run.threads=1"])
    with pytest.raises(ConfigError, match=r"engine.revision=v1: .*leave it out"):
        engine_of(config)
