"""README and docs: every command parses with settings that exist, code compiles and imports, generated parts are fresh.

Shell blocks are run by bash with no program on its path: a handler writes down each command as bash would have called
it, with variables, loops and line continuations resolved. Blocks of new_environment.md and new_algorithm.md are also
trained with, in test_testing.py and test_algorithm_records.py.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from spear_rl.envs import ENVIRONMENTS
from spear_rl.envs.adapters import ADAPTERS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
LANGUAGES = {"sh", "bash", "python", "toml", "text", "mermaid", "diff", ""}
OTHER_PROGRAMS = {"tensorboard", "pip", "cat", "tee", "torchrun", "pytest"}
RECORD = """
command_not_found_handle() { printf '%s\\0' "$@" >"$LOG/$EPOCHREALTIME.$BASHPID"; }
"""
"""A file per command, as those of a pipeline run at once; sorted by name they are in order."""


def blocks(page: Path, *languages: str) -> list[str]:
    return [body for _, language, body in FENCE.findall(page.read_text("utf-8")) if language in languages]


def commands_of(page: Path, folder: Path) -> list[list[str]]:
    """Every command of the page as a list of words: of shell blocks, and what else begins like one."""
    scripts = blocks(page, "sh", "bash")
    prose = FENCE.sub("", page.read_text("utf-8"))
    scripts += [match[0] for match in re.finditer(r"^    spear (?:.*\\\n)*.*$", prose, re.MULTILINE)]
    spans = re.findall(r"`((?:[A-Z_]+=\S+ )*(?:spear|make|python)\s[^`]+)`", prose)
    scripts += [" ".join(span.split()) for span in spans]
    (folder / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    (folder / ".venv" / "bin" / "activate").touch()
    calls = []
    for number, script in enumerate(scripts):
        log = folder / f"commands.{number}"
        log.mkdir()
        shown = subprocess.run(
            ["/bin/bash", "-c", RECORD + script], env={"PATH": "/nowhere", "LOG": str(log)}, cwd=folder,
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert "syntax error" not in shown.stderr, f"{page.name}: {shown.stderr}"
        calls += [path.read_text("utf-8").removesuffix("\0") for path in sorted(log.iterdir())]
    number = partial(re.sub, r"(?:(?<==)|^)[ST]$|^k$", "1")  # run.seed=S: any number
    return [[number(word) for word in call.split("\0") if word != "..." and word[:1] != "["] for call in calls]


def save_named_blocks(page: Path, folder: Path) -> None:
    """Write the blocks that the page asks the reader to save."""
    text = page.read_text("utf-8")
    for name, body in re.findall(r"[Ss]ave (?:this|it) as\s`([\w.]+)`[^`]*?:\n\n```\w+\n(.*?)```", text, re.DOTALL):
        (folder / name).write_text(body, "utf-8")


@pytest.fixture
def command_line() -> ModuleType:
    """The module of the command `spear`, wherever pyproject.toml says it is."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["scripts"]
    return importlib.import_module(scripts["spear"].split(":")[0])


@pytest.fixture
def parsed(command_line):
    """Words of a `spear` command in; its verb and arguments out. Unknown verbs and options raise."""
    import typer

    group = typer.main.get_command(command_line.app)

    def parse(words: list[str]) -> tuple[str, dict]:
        with group.make_context("spear", list(words), resilient_parsing=True) as context:
            verb = words[0]
            command = group.get_command(context, verb)
            assert command, f"spear has no verb {verb!r}"
            if words[1:] == []:
                return verb, {}  # a mention
            extra = command.make_context(verb, list(words[1:]), parent=context)
            return verb, extra.params | {"args": extra.args}

    return parse


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_on_a_page_names_things_that_exist(page, tmp_path, monkeypatch, spear, parsed):
    save_named_blocks(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    for program, *words in commands_of(page, tmp_path):
        said = f"{page.name}: {program} {' '.join(words)}"
        name = Path(program).name
        if name == "spear":
            check_spear(words, spear, parsed, said)
        elif name == "make":
            assert [w for w in words if "=" not in w and w not in targets] == [], said
        elif name in ("python", "python3"):
            check_python(words, said)
        else:
            assert name in OTHER_PROGRAMS, f"{said}: no such program is known here"
        for word in words:
            if re.fullmatch(r"(tests|benchmarks|examples)/[\w/]+\.(py|txt|sh)", word):
                assert (ROOT / word).is_file(), said


def check_spear(words, spear, parsed, said) -> None:
    verb, given = parsed(words)
    if not given:
        return
    settings = list(given.get("settings") or [])
    if verb == "verl":
        settings = [*given["args"], "--"]
        settings = settings[: settings.index("--")]
    elif verb == "eval":
        settings = [*([given["config"]] if given["config"] else []), *(given["set_"] or [])]
        settings += [f"task.env={given['env']}"] if given["env"] else []
    elif verb == "show":
        is_named = given["what"].islower() and not re.match(r"runs/|.*\.jsonl$", given["what"])
        if is_named and not any(setting.isupper() for setting in settings):
            expected = 2 if "dr-bot-mid_range:plain" in words else 0  # the page shows what is refused, too
            assert spear("show", given["what"], *settings)[0] == expected, said
        return
    elif verb in ("check-env", "shop"):
        env = given.get("env") or "webshop"
        if env in ENVIRONMENTS:
            check_options(env, [o.partition("=")[0] for o in given["options"] or []], said)
        return
    sources = [s for s in settings if "=" not in s]
    overrides = [s for s in settings if "=" in s]
    assert len(sources) <= 1, said
    code, text = spear("show", *(sources or ["config"]), *overrides)
    assert code == 0, f"{said}\n{text}"
    config = tomllib.loads(text)
    check_options(config["task"]["env"], config["task"]["options"], said)
    name = config["algorithm"]["name"]
    if name not in ("", None) and ":" not in name and any(o.startswith("algorithm.") for o in overrides):
        code, text = spear("show", "algorithm", *(sources or [name]), *overrides)
        assert code == 0, f"{said}\n{text}"


def check_options(env: str, options, said: str) -> None:
    if env in ENVIRONMENTS:
        known = inspect.signature(ENVIRONMENTS[env]).parameters
    elif env.endswith(".jsonl"):
        known = {}
    else:
        module, function = ADAPTERS.get(env.partition(":")[0], env).split(":")
        if importlib.util.find_spec(module.split(".")[0]) is None:
            assert module.startswith("my_"), f"{said}: there is no module {module}"
            return
        known = inspect.signature(getattr(importlib.import_module(module), function)).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    assert takes_any or set(options) <= set(known), f"{said}: {env} takes {list(known)}"


def check_python(words: list[str], said: str) -> None:
    if words and words[0] == "-m":
        if words[1].split(".")[0] == "spear_rl":
            assert importlib.util.find_spec(words[1]), said
        if words[1].split(".")[0] == "benchmarks":
            path = ROOT / words[1].replace(".", "/")
            assert path.with_suffix(".py").is_file() or path.is_dir(), said
    elif words and words[0].endswith(".py") and words[0] != "script.py":
        assert (ROOT / words[0]).is_file(), said


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_block_compiles_and_its_imports_of_ours_resolve(page):
    for body in blocks(page, "python"):
        for node in ast.walk(ast.parse(body)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "spear_rl":
                module = importlib.import_module(node.module)
                assert [a.name for a in node.names if not hasattr(module, a.name)] == [], f"{page.name}: {node.module}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_toml_block_is_a_configuration(page, tmp_path, spear):
    for body in blocks(page, "toml"):
        path = tmp_path / "block.toml"
        path.write_text(body, "utf-8")
        is_plan = "[arms." in body
        code, text = spear("experiment", str(path), "--dry-run") if is_plan else spear("show", str(path))
        assert code == 0, f"{page.name}: {text}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_its_language(page):
    assert {language for _, language, _ in FENCE.findall(page.read_text("utf-8"))} <= LANGUAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_heading_that_exists(page):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", page.read_text("utf-8")):
        assert anchor in anchors(page.parent / target if target else page), f"{page.name} links to {target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """Those of a page's headings, as code hosts make them; the site is set to the same rule."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_library_block_of_the_readme_runs_as_far_as_it_needs_no_trainer_of_yours():
    body = blocks(ROOT / "README.md", "python")[0]
    names: dict = {}
    exec(body.split("metrics =")[0], names)
    shown = re.search(r"print\(algorithm\.loss\)  # (.+?), \.\.\.", body)
    assert shown
    assert repr(names["algorithm"].loss).startswith(shown[1])


@pytest.mark.slow
def test_the_tutorial_works_from_its_own_environment_to_the_comparison(spear, tmp_path, monkeypatch):
    page = ROOT / "docs" / "tutorial.md"
    save_named_blocks(page, tmp_path)
    calls = commands_of(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    small = ["run.steps=2", "run.trajectories_every=1", "sft.episodes=8", "eval.tasks=4"]
    tried = set()
    for program, *words in calls:
        if program != "spear" or "runs/quickstart" in words:
            continue  # the quickstart itself takes minutes
        code, text = spear(*words, *(small if words[0] == "train" else []))
        assert code == 0, f"{words}: {text}"
        tried.add(words[0])
        if words[0] == "check-env":
            assert "no fault found" in text
    assert tried == {"check-env", "eval", "train", "compare", "show"}
    assert (tmp_path / "runs" / "compare" / "compare.png").is_file()


# -- generated parts ------------------------------------------------------------------------------------------------


def module_at(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def test_the_page_of_settings_is_what_the_command_line_says():
    maker = module_at(ROOT / "docs" / "tools" / "settings_page.py")
    page = (ROOT / "docs" / "settings.md").read_text("utf-8")
    shown = maker.shown_config()
    assert page == maker.page(shown), "docs/settings.md is out of date: run `make pages`"
    assert page.count("\n| `") == len(re.findall(r"^(?:# )?\w+ =", shown, re.MULTILINE)) > 80


def test_the_page_of_metrics_is_what_the_modules_say():
    maker = module_at(ROOT / "docs" / "tools" / "metrics_page.py")
    page = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    assert page == maker.page(maker.explained_metrics()), "docs/metrics.md is out of date: run `make pages`"


def test_every_metric_that_the_docs_name_is_explained():
    metrics = module_at(ROOT / "docs" / "tools" / "metrics_page.py").explained_metrics()
    for page in (ROOT / "docs" / "read_a_run.md", ROOT / "docs" / "runs.md", ROOT / "docs" / "tutorial.md"):
        named = re.findall(r"`((?:rollout|policy|replay|eval|time|sft)/\w+)`", page.read_text("utf-8"))
        assert [name for name in named if not any(entry.is_of(name) for entry in metrics)] == [], page.name


def test_the_differences_in_the_result_tables_are_those_of_the_detailed_tables():
    figures = module_at(ROOT / "benchmarks" / "figures.py")
    page = (ROOT / "docs" / "results.md").read_text("utf-8")
    found = figures.comparisons()
    assert len(found) == 4
    for comparison in found:
        for at in (figures.early(comparison), -1):
            mean, low, high = (100 * x for x in figures.paired_difference(comparison, at))
            assert f"{mean:+.1f} ({low:+.1f} to {high:+.1f})" in page, comparison.label
        means = [sum(seed[-1] for seed in arm) / len(arm) for arm in (comparison.base, comparison.spear)]
        assert f"| {means[0]:.3f} | {means[1]:.3f} |" in page, comparison.label


def test_the_differences_of_the_small_tasks_are_those_of_the_kept_results():
    tool = module_at(ROOT / "docs" / "tools" / "experiment_tables.py")
    cells = tool.Cells(ROOT / "experiments" / "results" / "cpu_tasks.csv")
    assert (len(cells.tasks), len(cells.bases)) == (5, 4)
    details = (ROOT / "docs" / "results_details.md").read_text("utf-8")
    rows = [line for line in tool.tables(cells, ["ours", "paper"]) if line.startswith("| `")]
    assert len(rows) == 20
    twelve_seeds = tool.Cells(ROOT / "experiments" / "results" / "dr_bot_gigpo.csv")
    further = [line for line in tool.tables(twelve_seeds, ["ours", "paper", "ours_step"]) if line.startswith("| `")]
    assert [row for row in rows + further[:2] + further[4:6] + further[8:10] if row not in details] == []
    step_part = tool.Cells(ROOT / "experiments" / "results" / "step_part.csv")
    fresh = [line for line in tool.tables(step_part, ["ours", "ours_step"]) if line.startswith("| `")]
    assert [row for row in fresh[:5] + fresh[10:15] if row not in details] == []
    ablations = tool.Cells(ROOT / "experiments" / "results" / "ablations.csv")
    changed = [line.split("|", 2)[2] for line in tool.changes(ablations, "paper")][2:]
    assert len(changed) == 14
    assert [row for row in changed if row not in details] == []
    page = (ROOT / "README.md").read_text("utf-8")
    readme = re.findall(r"^\| `.*\| ([\d.]+) \| (.*) \| (.*) \|$", page, re.MULTILINE)
    gains = [tuple(tool.interval(cells.by_seed(task, arm)) for arm in ("ours", "paper")) for task in cells.tasks]
    shown = [(f"{cells.base_mean(task):.3f}", *gain) for task, gain in zip(cells.tasks, gains, strict=True)]
    assert readme == shown


def test_a_table_of_differences_is_what_pencil_and_paper_give(tmp_path):
    tool = module_at(ROOT / "docs" / "tools" / "experiment_tables.py")
    values = {
        ("a", 1): (0.2, 0.3),
        ("a", 2): (0.4, 0.6),
        ("a", 3): (0.3, 0.6),
        ("b", 1): (0.5, 0.7),
        ("b", 2): (0.5, 0.5),
    }
    lines = [",".join(tool.COLUMNS)]
    for (base, seed), pair in values.items():
        lines += [f"t,{base},{arm},{seed},{x},{x}" for arm, x in zip(("base", "ours"), pair, strict=True)]
    (tmp_path / "kept.csv").write_text("\n".join(lines) + "\n", "utf-8")
    cells = tool.Cells(tmp_path / "kept.csv")
    assert cells.differences("t", "a", "ours") == pytest.approx({1: 10, 2: 20, 3: 30})
    assert cells.by_seed("t", "ours") == pytest.approx([15, 10])  # seed 3 has no b
    # t(0.975, 2 degrees) = 4.303, standard error 10 / sqrt(3)
    assert tool.interval([10, 20, 30]) == "+20.0 (-4.8 to +44.8)"
    assert tool.interval([19, 20, 21]) == "**+20.0 (+17.5 to +22.5)**"
    assert tool.interval([1, 2]) == "-"
    assert cells.base_mean("t") == pytest.approx(0.38)
    of_one_base = [",".join(tool.COLUMNS), *(line.replace("t,a,", "t,,") for line in lines[1:7])]
    (tmp_path / "kept.csv").write_text("\n".join(of_one_base) + "\n", "utf-8")
    # the standard error of 10, 20 and 30 is 5.77
    assert [*tool.changes(tool.Cells(tmp_path / "kept.csv"), "ours")][2:] == [
        "| base | -20.0 (-44.8 to +4.8) | -20.0 (5.8) |"
    ]


def test_the_figures_can_be_drawn_from_the_tables_and_are_small(tmp_path):
    figures = module_at(ROOT / "benchmarks" / "figures.py")
    figures.write(folder=tmp_path)
    for name in figures.FIGURES:
        assert "<svg" in (tmp_path / f"{name}.svg").read_text("utf-8")
        assert (ROOT / "docs" / "figures" / f"{name}.svg").stat().st_size < 150_000


def test_the_site_turns_links_to_files_outside_the_docs_into_what_it_has_for_them():
    pytest.importorskip("mkdocs", reason="the documentation's extra is not installed")
    hooks = module_at(ROOT / "docs" / "tools" / "site_hooks.py")
    text = "[a](../README.md) [b](../CONTRIBUTING.md#rules) [`c`](../Makefile) [d](runs.md#x)"

    def on_site(uri: str, markdown: str, repo_url: str = "") -> str:
        page, config = SimpleNamespace(file=SimpleNamespace(src_uri=uri)), SimpleNamespace(repo_url=repo_url)
        return hooks.on_page_markdown(markdown, page, config, None)

    assert on_site("gpu.md", text) == "[a](index.md) [b](contributing.md#rules) `c` [d](runs.md#x)"
    assert on_site("reference/train.md", "[t](../trl.md)") == "[t](../trl.md)"
    assert on_site("contributing.md", "[g](docs/glossary.md)") == "[g](glossary.md)"
    assert on_site("gpu.md", "[e](../examples/minimal_spear.py)") == "[e](minimal_spear.md)"
    source = on_site("gpu.md", "[c](../Makefile)", "https://example.org/us/spear")
    assert source == "[c](https://example.org/us/spear/blob/main/Makefile)"
    assert on_site("gpu.md", "```text\n[a](../README.md)\n```\n") == "```text\n[a](../README.md)\n```\n"


@pytest.mark.slow
def test_the_site_is_not_built_with_a_broken_link_anchor_image_or_reference(tmp_path):
    pytest.importorskip("mkdocs", reason="the documentation's extra is not installed")
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "mkdocs.yml", "src", "examples", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    faults = ["[a](nothing.md)", "[b](runs.md#nowhere)", "![c](figures/none.svg)", "[d](../src/none.py)"]
    with (tmp_path / "docs" / "gpu.md").open("a", encoding="utf-8") as page:
        page.write("\n".join(["", *faults]))
    with (tmp_path / "docs" / "reference" / "types.md").open("a", encoding="utf-8") as page:
        page.write("\n[x][spear_rl.types.NoSuchType]\n")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(tmp_path / "mkdocs.yml")]
    command += ["--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert built.returncode != 0
    for name in ("nothing.md", "#nowhere", "figures/none.svg", "src/none.py", "NoSuchType"):
        assert name in built.stderr, built.stderr
