"""The benchmark programs: everybody has the same work, and a rehearsal on a CPU gives a table and a JSON."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from spear_rl.app.config import load
from spear_rl.engines.models.tiny import tiny_model
from spear_rl.integrations.verl.launch import verl_settings

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _path(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.mark.parametrize(("name", "millions"), [("random-0.5b", 494), ("random-1.5b", 1544)])
def test_random_models_have_the_size_of_the_published_ones(name, millions):
    from benchmarks.gpu.workload import random_model

    with torch.device("meta"):
        model = random_model(name)
    assert round(model.num_parameters() / 1e6) == millions
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_whatever_a_random_model_writes_has_a_text_and_its_folder_is_read_as_it_was(tmp_path):
    from benchmarks.gpu.workload import random_tokenizer
    from transformers import AutoTokenizer, Qwen2Config

    from spear_rl.rollout.rendering.renderer import ChatRenderer

    tokenizer = random_tokenizer(3000)
    tokenizer.save_pretrained(tmp_path)
    Qwen2Config(vocab_size=3000).save_pretrained(tmp_path)  # by its model's type transformers takes another class
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == len(again) == 3000
    text = "You open the drawer 2. It is empty. \u00e9"
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert again.decode(again(text)["input_ids"]) == text
    renderer = ChatRenderer(again)
    prompt = renderer.prompt([{"role": "user", "content": text}])
    assert prompt[0] == again.convert_tokens_to_ids("<|im_start|>")
    said = [random.Random(0).randrange(600, 2990) for _ in range(20)]
    assert renderer.parse(said) == again.decode(said).strip()
    assert len(set(renderer.parse(said).split())) == len(set(said))


def test_work_of_rollouts_and_rows_counts_what_is_shared_once():
    from benchmarks.gpu.work import RolloutWork, RowWork, rollout_work, row_work

    rows = [[1, 2, 3], [1, 2, 4, 5], [1, 2, 4], [7]]
    assert row_work(rows, 5, share=False) == RowWork(11, 6 + 10 + 6 + 1, 5)
    prefixes = {tuple(row[: at + 1]) for row in rows for at in range(len(row))}
    assert row_work(rows, 5, share=True) == RowWork(len(prefixes), sum(map(len, prefixes)), 5)

    # Two siblings after a prompt of 4; one turn of 3 tokens, and two of 2 and 1 with an observation of 5 between.
    work = rollout_work([(4, [[(3, 9)], [(2, 5), (1, 9)]])])
    fed = [range(1, 5), range(5, 7), range(5, 12)]  # number of keys that each token sees
    assert work == RolloutWork(
        computed=sum(map(len, fed)), sampled=6, attended=sum(map(sum, fed)), keys_read=(1 + 2) + 1 + 4 * 2, steps=2
    )


def test_an_agentic_rollout_is_the_same_work_whatever_is_sampled():
    from benchmarks.gpu.agentic import ANSWER, SIZES, episodes_of, longest

    arguments = Namespace(**SIZES["cuda"])
    first, again, other = (episodes_of(arguments, 50_000, number) for number in (1, 1, 2))
    assert len(first) == 128
    assert len({tuple(episode.ids) for episode in first}) == 16, "a group shares its first prompt"
    assert [e.answers for e in first] == [e.answers for e in again] != [e.answers for e in other]
    lengths = []
    for episode, twin in zip(first, again, strict=True):
        going = True
        while going:
            count = episode.answers[episode.turn]
            assert ANSWER[0] <= count <= ANSWER[1]
            assert episode.prompt().max_new_tokens == count
            going = episode.answered([7] * count)
            assert twin.answered([8] * count) == going
        assert len(episode.ids) == len(twin.ids)
        lengths.append(len(episode.ids))
    assert max(lengths) <= longest(arguments)
    with pytest.raises(RuntimeError, match="tokens instead of"):
        other[0].answered([1])


def test_rows_of_a_log_share_their_prefixes_and_train_their_answers():
    from benchmarks.gpu.workload import log_rows

    batch = log_rows(16, 1000, 0, seed=3)
    assert len(batch) == 256
    assert (batch.mask.sum(1) == 12).all()
    assert int(batch.attention[0].sum()) == 350 + 5 + 12
    assert int(batch.attention[15].sum()) == 350 + 15 * 30 + 5 + 12
    assert (batch.input_ids[0, :350] == batch.input_ids[127, :350]).all(), "one group"
    assert (batch.input_ids[0, :350] != batch.input_ids[128, :350]).any(), "another"


def test_verl_is_given_the_same_tasks_limits_and_updates(tmp_path):
    from benchmarks.gpu.rl_step import MAX_CONTEXT, SIZES, verl_command

    (tmp_path / "model").mkdir()
    arguments = Namespace(**SIZES["cuda"], model=str(tmp_path / "model"), vllm_memory=0.3, option=["a.b=3"])
    command = verl_command(arguments, str(tmp_path))
    cut = command.index("--")
    config = load(None, command[command.index("verl") + 1 : cut])
    theirs = dict(word.split("=", 1) for word in command[cut + 1 :])
    assert (theirs["a.b"], theirs["trainer.v1.trainer_mode"]) == ("3", "sync")
    keys = verl_settings(config, tmp_path, theirs)
    assert keys["data.train_batch_size"] == keys["actor_rollout_ref.actor.ppo_mini_batch_size"] == 16
    assert keys["actor_rollout_ref.rollout.n"] == 8
    assert keys["trainer.total_training_steps"] == 8
    assert (keys["data.max_prompt_length"], keys["data.max_response_length"]) == (MAX_CONTEXT, 32)
    assert config.rollout.stop == ["</action>"]


class FakeEngine:
    """vLLM's engine: requests are finished in another order than they came."""

    def __init__(self) -> None:
        self.pending: list[tuple[str, int]] = []
        self.num_steps = 0

    def add_request(self, request_id, prompt, params) -> None:
        assert prompt["prompt_token_ids"]
        assert params.ignore_eos
        assert params.logprobs == 0
        self.pending.append((request_id, params.max_tokens))

    def has_unfinished_requests(self) -> bool:
        return bool(self.pending)

    def step(self):
        self.num_steps += 1
        done = self.pending.pop(self.num_steps % len(self.pending))
        return [SimpleNamespace(request_id=done[0], finished=True, outputs=[SimpleNamespace(token_ids=(1,) * done[1])])]


def test_vllm_is_driven_through_every_turn_of_every_episode(monkeypatch):
    from benchmarks.gpu import agentic

    engine = FakeEngine()

    class FakeLLM:
        def __init__(self, **settings) -> None:
            assert settings["enable_prefix_caching"]
            self.llm_engine, self.reset_prefix_cache = engine, lambda: True

        def generate(self, inputs, params, *, use_tqdm):
            assert len(inputs) == len(params)
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=(1,) * p.max_tokens)]) for p in params]

    for name, contents in {
        "vllm": {"LLM": FakeLLM, "SamplingParams": lambda **given: SimpleNamespace(**given)},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY=2)},
    }.items():
        module = ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda name: range(5000))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "")
    for which, names in (("vllm", ["vllm", "vllm, turn by turn"]), ("vllm-process", ["vllm-process"])):
        engine.num_steps, measured = 0, []
        arguments = Namespace(**agentic.SIZES["cpu"], model="folder", option=[], engine=which)
        for name, (play, vocabulary) in agentic.vllm(arguments):
            measured.append(name)
            episodes = agentic.episodes_of(arguments, vocabulary, 0)
            play(episodes)
            assert all(episode.turn == arguments.turns for episode in episodes), name
        assert measured == names
        assert engine.num_steps == arguments.episodes * arguments.turns
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == str(int(which == "vllm-process"))


VERL = """
import sys, time
for step in range(1, 5):
    print(f"step:{step} - timing_s/step:{step} - timing_s/gen:0.5 - num_turns/mean:2.0", flush=True)
time.sleep(float(sys.argv[1]))
sys.exit(3)
"""


@pytest.mark.parametrize("is_ended", [False, True])
def test_a_run_of_verl_that_is_cut_short_tells_of_the_steps_it_made(is_ended, tmp_path):
    """By a failure, or from outside, when it also ends what it has started."""
    marker, out = f"verl{os.getpid()}{is_ended}", tmp_path / "result.json"
    program = f"""
import sys
from benchmarks.gpu import rl_step
rl_step.verl_command = lambda *_: [sys.executable, "-c", {VERL!r}, "{600 if is_ended else 0}", "{marker}"]
sys.argv[1:] = "--engine verl --device cpu --model none --out {out}".split()
rl_step.main()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])},
    )
    if is_ended:
        until(out.is_file)
        process.terminate()
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 1, said
    assert is_ended or "verl ended with code 3 after 4 steps" in said
    kept = json.loads(out.read_text())["results"]["verl"]
    assert [step["seconds"] for step in kept["steps"]] == [1, 2, 3, 4]
    assert (kept["seconds"], kept["update_s"], kept["turns"], kept["peak_gib"]) == (3, 2.5, 8, None)
    until(lambda: not running(marker))


def until(is_so, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.1)


def running(marker: str) -> bool:
    lines = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
    try:
        return any(marker.encode() in line for line in lines)
    except OSError:  # it ended meanwhile
        return running(marker)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes by /proc")
@pytest.mark.parametrize(("seconds", "patience", "error"), [(0, 60, None), (600, 3, "not done after 3 s")])
def test_what_a_part_leaves_running_is_ended_with_it(seconds, patience, error):
    marker = f"left{os.getpid()}{seconds}"
    leaves = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:4], start_new_session=True)"
    command = [sys.executable, "-c", f"{leaves}; time.sleep({seconds})", sys.executable, "-c"]
    command += ["import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)", marker]
    program = f"""
from benchmarks.gpu import run
run._adopt_orphans()
print(run._run({command!r}, {patience}, {{}}), run.descendants())
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == f"{error} []", done.stderr
    assert not running(marker)


def test_runs_are_joined_by_model_and_no_failure_replaces_a_measurement(tmp_path):
    from benchmarks.gpu.run import joined, lines, told

    sizes = {"tasks": 2, "warmups": 1, "steps": 3}

    def step(*seconds: float, **more: object) -> dict[str, object]:
        name = "base" if len(seconds) == 4 else "verl"
        steps = [{"seconds": one} for one in seconds]
        return {"sizes": sizes | more, "results": {name: {"seconds": sorted(seconds)[1], "steps": steps}}}

    copy = {"copy_bytes_per_s": 1e9, "matmul_flops": 1e9}
    shape = {"num_layers": 1, "width": 10, "kv_width": 10, "body": 1000, "head": 500}
    work = {"rollout": {"computed": 10**6, "sampled": 1, "attended": 0, "keys_read": 0, "steps": 1}}
    work["rows"] = {"tokens": 10**6, "attended": 0, "trained": 0}
    runs = [
        {"model": "/a/135m", "rl_step:base": step(9, 1, 2, 4) | {"work": work, "facts": {"torch": "2"}}},
        {"model": "135m", "rl_step:verl": step(8, 4, tasks=4), "rl_step:base": {"error": "broken"}},
        {"model": "135m", "floor:floor": {"shape": shape, "ceilings": copy, "results": {"generation": {}}}},
        {"model": "1.5b", "rl_step:trl": {"error": "out of memory"}},
    ]
    runs[2]["floor:floor"]["results"] = {"generation": {"tokens_per_s": 5.0}}
    files = [tmp_path / f"{number}.json" for number in range(len(runs))]
    for file, run in zip(files, runs, strict=True):
        file.write_text(json.dumps(run))
    models = joined(files)
    assert list(models) == ["135m", "1.5b"]
    found = {line.whose: line for line in lines(models["135m"])[:5]}
    assert (found["ours"].value, found["ours"].spread) == (2, (1, 4))
    assert (found["verl with vLLM"].value, found["verl with vLLM"].verdict) == (8, "4.00x as fast")
    assert found["floor"].value == pytest.approx(2 + 6, rel=0.01)
    said = told(models["135m"])
    assert "1.00 to 4.00" in said
    assert "rl_step:verl: other work than the rest of rl_step" in said
    assert "rl_step:base: torch 2" in said
    assert "rl_step:base 1, 3" in said
    assert "out of memory" in told(models["1.5b"])


def test_the_step_with_replay_replays_whatever_the_model_says(tmp_path, monkeypatch, tokenizer):
    from benchmarks.gpu import rl_step

    monkeypatch.setattr(rl_step, "loaded", lambda name: (tiny_model("tiny-xs", tokenizer), tokenizer))

    out = tmp_path / "out.json"
    options = {
        "engine": "spear",
        "model": "tiny",
        "device": "cpu",
        "out": out,
        "siblings": 4,
        "turns": 1,
        "new-tokens": 3,
    }
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    monkeypatch.setattr(sys, "argv", ["rl_step", *words])
    rl_step.main()
    steps = json.loads(out.read_text())["results"]["spear"]["steps"]
    assert [step["replayed"] > 0 for step in steps] == [False, True, True], "the first step has nothing stored"


@pytest.mark.slow
def test_a_rehearsal_writes_a_table_and_everything_needed_to_repeat_it(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "agentic_rollouts.py", "--device", "cpu", "--model", "tiny"]
    done = subprocess.run(
        [*map(str, command), "--only", "agentic:ours", "agentic:vllm", "floor"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "| agentic rollouts " in done.stdout
    kept = json.loads((tmp_path / "agentic_rollouts.json").read_text())
    assert kept["agentic:ours"]["results"]["ours"]["tokens_per_s"] > 0
    assert {"python", "torch", "transformers"} <= kept["agentic:ours"]["facts"].keys()
    assert "agentic_rollouts.py" in kept["command"]
    assert kept["agentic:ours"]["sizes"]["seed"] == 0


@pytest.mark.parametrize(
    ("kind", "names"),
    {
        "attention": [
            "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Traits<64, cutlass::half_t>>",
            "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>)",
            "_attend",
            "_backward_keys",
            "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
            "triton_tem_fused_flex_attention_0",
        ],
        "matrix products": [
            "nvjet_tst_128x64_64x8_1x2_h_bz_TNT",
            "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(Params)",
            "void cublasLt::splitKreduce_kernel<32, 16, int, float>",
            "triton_tem_fused_mm_3",
            "aten::addmm",
        ],
        "sampling": ["_sample"],
        "optimizer": [
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>",
            "Optimizer.step#AdamW.step",
        ],
        "copies and gathers": [
            "Memcpy DtoH (Device -> Pinned)",
            "Memset (Device)",
            "void at::native::(anonymous namespace)::CatArrayBatchedCopy<unsigned int, 2, 64, 64>",
            "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*)",
            "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel>",
            "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(TensorIteratorBase&)>",
        ],
        "other (elementwise, reductions, compiled)": [
            "triton_poi_fused__to_copy_cat_index_mul_scaled_dot_product_attention_mm_2",
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
            "void (anonymous namespace)::elementwise_kernel_with_index<int, arange_cuda_out>",
            "aten::mul",
        ],
    }.items(),
)
def test_the_step_profile_tells_kernels_apart_by_their_names(kind, names):
    from benchmarks.step_profile import kind_of

    assert {name: kind_of(name) for name in names} == dict.fromkeys(names, kind)


def test_the_step_profile_counts_a_moment_once_however_many_kernels_ran_in_it():
    from benchmarks.step_profile import covered

    assert covered([]) == 0
    rng = random.Random(0)
    for _ in range(200):
        starts = [rng.randrange(60) for _ in range(rng.randrange(12))]
        intervals = [(start, start + rng.randrange(15)) for start in starts]
        assert covered(intervals) == len({moment for start, end in intervals for moment in range(start, end)})


def test_a_profile_on_a_gpu_counts_what_ran_there_and_not_what_the_cpu_did():
    from benchmarks.step_profile import Phase
    from torch.autograd import DeviceType

    def event(name: str, device: DeviceType, start: int, duration: int) -> SimpleNamespace:
        about = {"name": name, "device_type": device, "start_ns": start * 10**9, "duration_ns": duration * 10**9}
        return SimpleNamespace(**{key: lambda value=value: value for key, value in about.items()})

    ran = [("nvjet_tst", 10, 4), ("_attend", 12, 4), ("_attend", 18, 2)]
    events = [event(name, DeviceType.CUDA, *times) for name, *times in ran]
    events.append(event("cudaGraphLaunch", DeviceType.CPU, 0, 50))
    phase = Phase()
    for _ in range(2):
        results = SimpleNamespace(events=lambda: events)
        phase.add(SimpleNamespace(profiler=SimpleNamespace(kineto_results=results)), on_gpu=True)
    means = phase.per_step(2)
    assert (means["busy"], means["span"], means["runs"]) == (8, 10, 3)
    assert means["kinds"]["attention"] == (6, 0.6, 2)
    assert list(means["longest"].items()) == [("_attend", (6, 0.6, 2)), ("nvjet_tst", (4, 0.4, 1))]


@pytest.mark.slow
def test_a_rehearsal_of_the_step_profile_says_where_rollout_and_update_spent_their_time(tmp_path):
    command = [
        sys.executable,
        ROOT / "benchmarks" / "step_profile.py",
        "lookup",
        "--steps",
        "2",
        "--json",
        "found.json",
    ]
    settings = ["run.threads=1", "sft.episodes=0", "rollout.num_tasks=2", "rollout.group_size=2"]
    done = subprocess.run([*map(str, command), *settings], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    first, *parts = done.stdout.strip().split("\n\n")
    assert first.startswith("torch ")
    assert "lookup run.threads=1" in first
    tables = [[row.strip("| ").split(" | ") for row in part.splitlines()] for part in parts]
    assert [table[0][0] for table in tables] == [
        "phase",
        "rollout: kind of operator",
        "rollout: longest operators",
        "update: kind of operator",
        "update: longest operators",
    ]
    kept = json.loads((tmp_path / "found.json").read_text())
    for name, table in (("rollout", tables[1]), ("update", tables[3])):
        shares = {row[0]: float(row[2].rstrip("%")) for row in table[2:]}
        assert sum(shares.values()) == pytest.approx(100, abs=0.5)
        assert shares["attention"] > 0
        assert shares["matrix products"] > 0
        phase = kept["phases"][name]
        assert 0 < phase["busy"] <= phase["span"] <= phase["seconds"]
        assert len(phase["longest"]) == 10
        assert 0 < kept["seconds"][name] < kept["seconds"]["step"]
    assert kept["phases"]["update"]["kinds"]["optimizer"][2] >= 1
    assert list(tmp_path.iterdir()) == [tmp_path / "found.json"]
