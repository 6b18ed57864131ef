"""Sokoban in pictures: vision-language models from scratch, through the renderer, the engine and the real trainer."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("PIL")
pytest.importorskip("transformers")

from conftest import logged
from spear_rl.engines.base import Term
from spear_rl.engines.hf import HFEngine
from spear_rl.engines.models.load import model_by_name, model_in_folder
from spear_rl.engines.models.tiny import tiny_model, tiny_tokenizer
from spear_rl.engines.vision import Pixels
from spear_rl.envs import sokoban
from spear_rl.errors import ConfigError
from spear_rl.rollout import Sampling
from spear_rl.rollout.choice import Start
from spear_rl.rollout.collect import collect_groups, demonstration
from spear_rl.rollout.rendering.images import VisionRenderer, pil_image
from spear_rl.rollout.rendering.renderer import LAYOUTS, ChatRenderer
from spear_rl.train.cold_start import imitation_loss
from spear_rl.train.step import collate
from spear_rl.types import ImagePrompt

TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}PICTURE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
WORDS = ["up down left right", "You walk up.", "You push a box up. Solved!", "This is the room.", "nothing moves."]
TEXT_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
}


def llava(seed: int = 0) -> tuple[Any, Any]:
    """A LLaVA of two layers for pictures of 24 x 24 pixels, nine tokens each, and its processor."""
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor, Qwen2Config
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = tiny_tokenizer(WORDS)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 24}, crop_size={"height": 24, "width": 24}),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE.replace("PICTURE", "<image>"),
    )
    config = LlavaConfig(
        text_config=Qwen2Config(vocab_size=-(-len(tokenizer) // 8) * 8, **_ends(tokenizer), **TEXT_SHAPE),
        vision_config=CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=24,
            patch_size=8,
            projection_dim=32,
        ),
        vision_feature_layer=-1,
        image_token_id=processor.image_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlavaForConditionalGeneration(config), processor


def qwen2_vl(seed: int = 0) -> tuple[Any, Any]:
    """A Qwen2-VL of two layers, whose positions have three dimensions, with a processor that has no videos."""
    from transformers import ProcessorMixin, Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    class StillsProcessor(Qwen2VLProcessor):
        def __init__(self, image_processor=None, tokenizer=None, chat_template=None) -> None:
            self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
            self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
            self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    tokenizer = tiny_tokenizer(WORDS)
    special = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    processor = StillsProcessor(
        Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=64, max_pixels=4096),
        tokenizer,
        chat_template=TEMPLATE.replace("PICTURE", "<|vision_start|><|image_pad|><|vision_end|>"),
    )
    start, end, image, video = tokenizer.convert_tokens_to_ids(special)
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": -(-len(tokenizer) // 8) * 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        }
        | _ends(tokenizer)
        | TEXT_SHAPE,
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2VLForConditionalGeneration(config), processor


def _ends(tokenizer: Any) -> dict[str, Any]:
    return {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}


def engine_of(made: tuple[Any, Any], **options: Any) -> HFEngine:
    model, processor = made
    options = {"sampling": Sampling(max_new_tokens=3), "learning_rate": 1e-3} | options
    return HFEngine(model, processor.tokenizer, processor=processor, **options)


def played(engine: HFEngine, *, layout: str, max_turns: int = 3, **options: Any) -> list[Any]:
    tasks = sokoban.tasks("train", **({"observation": "image", "tile": 4, "max_tasks": 3} | options))
    groups = collect_groups(
        tasks,
        group_size=2,
        generator=engine,
        renderer=VisionRenderer(engine.processor),
        max_turns=max_turns,
        step=0,
        layout=partial(LAYOUTS[layout], detail="short"),
    )
    return [t for group in groups for t in group.trajectories]


def batch_of(engine: HFEngine, episodes: list[Any]) -> Any:
    return collate(episodes, [[1.0] * len(t.turns) for t in episodes], pad_id=engine.pad_id)


@pytest.mark.parametrize("layout", ["chat", "turns", "log"])
@pytest.mark.parametrize("make", [llava, qwen2_vl])
def test_the_sampler_and_the_training_forward_agree_on_every_token(make: Any, layout: str) -> None:
    engine = engine_of(make())
    episodes = played(engine, layout=layout)
    batch = batch_of(engine, episodes)
    assert len(batch) == (6 if layout == "chat" else 18)
    assert [len(turn.images) for turn in episodes[0].turns] == ([1, 2, 3] if layout == "chat" else [1, 1, 1])
    logprobs, entropies = engine.scored(batch)
    torch.testing.assert_close(logprobs[batch.mask], batch.old_logprobs[batch.mask], rtol=0, atol=1e-5)
    sampled = torch.tensor([e for t in episodes for turn in t.turns for e in turn.completion.entropies])
    torch.testing.assert_close(entropies[batch.mask], sampled, rtol=0, atol=1e-4)


@pytest.mark.parametrize("layout", ["chat", "turns", "log", "now"])
def test_given_turns_of_a_win_have_its_pictures_again(layout: str) -> None:
    engine = engine_of(llava())
    renderer, lay_out = VisionRenderer(engine.processor), partial(LAYOUTS[layout], detail="short")
    [task] = sokoban.tasks("train", observation="image", tile=4, max_tasks=1)
    win = demonstration(task, renderer=renderer, layout=lay_out, tagged=False, seed=0)
    num_given = len(win.turns) - 1
    start = Start(tuple(replace(turn, prompt_ids=[], images=()) for turn in win.turns), num_given)
    [group] = collect_groups(
        [task],
        group_size=2,
        generator=engine,
        renderer=renderer,
        layout=lay_out,
        max_turns=len(win.turns),
        step=0,
        starts=[start],
    )
    for t in group.trajectories:
        assert t.turns[:num_given] == win.turns[:num_given]
        assert (t.turns[-1].prompt_ids, t.turns[-1].images) == (win.turns[-1].prompt_ids, win.turns[-1].images)


@pytest.mark.parametrize("make", [llava, qwen2_vl])
def test_what_a_picture_shows_reaches_the_scores_and_each_row_has_its_own(make: Any) -> None:
    engine = engine_of(make())
    batch = batch_of(engine, played(engine, layout="turns", max_turns=1))
    as_it_is, _ = engine.scored(batch)
    order = torch.tensor([5, 2, 0, 4, 1, 3])
    torch.testing.assert_close(engine.scored(batch.rows(order))[0], as_it_is[order], rtol=0, atol=1e-6)
    others = replace(batch, images=batch.images[2:] + batch.images[:2])  # another task's, two siblings being one task
    differs = (engine.scored(others)[0] - as_it_is).abs().sum(1)
    assert (differs > 1e-6).all()


@pytest.mark.parametrize("make", [llava, qwen2_vl])
def test_no_result_depends_on_how_rows_with_pictures_are_cut(make: Any) -> None:
    norms = []
    for tokens in (100_000, 64):
        engine = engine_of(make(), micro_batch_tokens=tokens, max_kept_tokens=tokens)
        episodes = played(engine_of(make()), layout="chat")
        norms.append(engine.update([Term("policy", batch_of(engine, episodes), imitation_loss)])["policy/grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@pytest.mark.parametrize("make", [llava, qwen2_vl])
def test_the_gradient_reaches_the_vision_tower(make: Any) -> None:
    engine = engine_of(make())
    before = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    engine.update([Term("policy", batch_of(engine, played(engine, layout="chat")), imitation_loss)])
    seen = [name for name, p in engine.model.named_parameters() if "visual" in name or "vision_tower" in name]
    moved = [name for name in seen if not torch.equal(before[name], engine.model.get_parameter(name))]
    assert len(seen) > 20
    assert len(moved) > 0.8 * len(seen)


@pytest.mark.parametrize("make", [llava, qwen2_vl])
def test_a_critic_sees_the_pictures_too(make: Any) -> None:
    engine = engine_of(make())
    batch = batch_of(engine, played(engine, layout="turns", max_turns=1))
    engine.hold_critic(1e-2)
    goals = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        engine.critic.update(batch, torch.zeros(batch.mask.shape), goals, clip=None)
    values = engine.critic.values(batch)
    order = torch.tensor([5, 2, 0, 4, 1, 3])
    torch.testing.assert_close(engine.critic.values(batch.rows(order)), values[order], rtol=1e-4, atol=1e-5)
    others = replace(batch, images=batch.images[2:] + batch.images[:2])
    assert ((engine.critic.values(others) - values).abs().sum(1) > 1e-6).all()


@pytest.mark.parametrize("make", [llava, qwen2_vl])
def test_a_policy_never_writes_the_tokens_that_stand_for_pictures(make: Any) -> None:
    model, processor = make()
    head = model.get_output_embeddings()
    head.weight.data[processor.image_token_id] = 50 * head.weight.data.mean(0)  # sometimes by far the likeliest token
    for temperature in (1.0, 0.0):
        engine = engine_of((model, processor), sampling=Sampling(max_new_tokens=8, temperature=temperature))
        for episode in played(engine, layout="chat"):
            for turn in episode.turns:
                assert processor.image_token_id not in turn.completion.token_ids


def test_generation_ends_at_an_end_token_at_a_stop_string_and_at_the_limit() -> None:
    model, processor = llava()
    [task] = sokoban.tasks("train", observation="image", tile=4, max_tasks=1)
    renderer = VisionRenderer(processor)
    first = task.make_env().reset()
    prompt = renderer.prompt([{"role": "user", "content": "Go", "images": first.images}])
    assert isinstance(prompt, ImagePrompt)
    assert prompt.images == first.images
    prompts = [prompt, renderer.prompt([{"role": "user", "content": "You walk up.", "images": first.images}])] * 40
    sampling = Sampling(max_new_tokens=12, stop=("up",))
    out = engine_of((model, processor), sampling=sampling).generate(prompts)
    assert len(out) == 80
    assert out == engine_of((model, processor), sampling=sampling).generate(prompts)
    for completion in out:
        text = processor.tokenizer.decode(completion.token_ids)
        ended = completion.token_ids[-1] == processor.tokenizer.eos_token_id or text.endswith("up")
        assert ended != completion.truncated
        assert "up" not in processor.tokenizer.decode(completion.token_ids[:-1])
        assert len(completion.token_ids) == len(completion.logprobs) <= 12
        assert len(completion.token_ids) == 12 or ended


def test_settings_of_the_model_s_own_do_not_bend_the_sampling() -> None:
    model, processor = llava()
    plain = played(engine_of((model, processor)), layout="chat")
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.top_k = 1
    model.generation_config.temperature = 0.1
    model.generation_config.do_sample = True
    assert played(engine_of((model, processor)), layout="chat") == plain


def test_demonstrations_have_the_tokens_that_a_policy_would_see() -> None:
    engine = engine_of(llava())
    [task] = sokoban.tasks("train", observation="both", tile=4, max_tasks=1)
    shown = demonstration(task, renderer=VisionRenderer(engine.processor), tagged=True, seed=0)
    assert shown.success
    tokenizer, placeholder = engine.processor.tokenizer, engine.processor.image_token_id
    for number, turn in enumerate(shown.turns):
        assert turn.prompt_ids.count(placeholder) == 9 * (number + 1)
        assert len(turn.images) == number + 1
        assert tokenizer.decode(turn.completion.token_ids).startswith("<action>")
    assert len(batch_of(engine, [shown])) == 1


def test_a_policy_that_reads_text_only_refuses_pictures_in_one_sentence() -> None:
    tokenizer = tiny_tokenizer(WORDS)
    engine = HFEngine(tiny_model("tiny-xs", tokenizer), tokenizer, sampling=Sampling(max_new_tokens=2))
    tasks = sokoban.tasks("train", observation="image", max_tasks=1)
    with pytest.raises(ConfigError, match=r"task\.options\.observation=text"):
        collect_groups(tasks, group_size=2, generator=engine, renderer=ChatRenderer(tokenizer), max_turns=2, step=0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A vision-language model as users have it: a folder with its processor."""
    model, processor = llava()
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


SETTINGS = (
    "task.env=sokoban",
    'task.options={level="starter",observation="image",tile=4,max_tasks=8}',
    "rollout.num_tasks=2",
    "rollout.group_size=3",
    "rollout.max_turns=3",
    "rollout.max_new_tokens=3",
    "rollout.detail=short",
    "optim.learning_rate=1e-3",
    "algorithm.name=spear-gigpo",
    "algorithm.imitation.warm_steps=1",
    "algorithm.imitation.fraction=1.0",
    "algorithm.imitation.gate=old",
    "sft.episodes=4",
    "sft.epochs=1",
    "sft.batch_size=2",
    "eval.tasks=4",
    "run.checkpoint_every=2",
)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_the_trainer_trains_on_pictures_and_resumes_bit_for_bit(
    spear: Any, tmp_path: Path, folder: Path, workers: int
) -> None:
    def train(run: str, *more: object) -> list[dict]:
        code, printed = spear("train", f"run.dir={tmp_path / run}", *more)
        assert code == 0, printed
        return logged(tmp_path / run)

    # An untrained policy never wins and always hits its token limit: the defaults would store and replay nothing.
    anything = ("algorithm.imitation.admit_by_score=true", "algorithm.imitation.skip_invalid=false")
    settings = (
        *SETTINGS,
        *anything,
        "run.trajectories_format=jsonl",
        f"engine.model={folder}",
        f"rollout.workers={workers}",
    )
    whole = train("whole", *settings, "run.steps=5")
    assert all(abs(step["policy/sampler_gap"]) < 1e-4 for step in whole if "policy/sampler_gap" in step)
    assert any(step["replay/fired"] for step in whole)
    train("halves", *settings, "run.steps=2", "algorithm.bonus.steps=5")
    halves = train("halves", "run.resume=true", "run.steps=5")
    assert halves == whole
    state = tmp_path / "whole" / "checkpoints" / "step_000005" / "trainer_state.pt"
    saved = torch.load(state, weights_only=True)
    stored = [entry[0]["trajectory"]["turns"] for entry in saved["algorithm"]["imitation"]["buffer"]["items"]]
    assert stored
    assert all(turn["images"] and max(map(len, turn["images"])) < 1000 for turns in stored for turn in turns)
    lines = (tmp_path / "whole" / "trajectories" / "step_000000.jsonl").read_text().splitlines()
    assert "PNG" not in lines[0]
    assert json.loads(lines[0])["turns"]


def test_a_policy_learns_from_what_pictures_show() -> None:
    """Rooms that differ in nothing but their picture: only who looks at it can tell the first moves apart."""
    engine = engine_of(llava(), learning_rate=3e-3)
    tasks = sokoban.tasks("train", level="starter", observation="image", tile=4)[:40]
    shown = [demonstration(t, renderer=VisionRenderer(engine.processor), tagged=False, seed=0) for t in tasks]
    first = {t.turns[0].text: replace(t, turns=t.turns[:1]) for t in shown}  # one for each direction
    batch = batch_of(engine, list(first.values()))
    assert len({tuple(row) for row in batch.input_ids[:, :15].tolist()}) == 1
    assert len(first) == 4
    for _ in range(120):
        loss = engine.update([Term("sft", batch, imitation_loss)])["sft/loss"]
    assert loss < 0.1, "without the picture it is at best log 4 over two tokens, 0.69"
    others = replace(batch, images=batch.images[1:] + batch.images[:1])
    assert float(-engine.scored(others)[0][batch.mask].mean()) > 0.69


# the built-in model


TEXTS = ["This is the room.", "up", "down", "left", "right"]


def test_the_built_in_model_depends_on_its_words_and_seed_alone() -> None:
    made = [model_by_name("tiny-vision", texts=partial(list, texts), seed=1) for texts in (TEXTS, TEXTS[::-1])]
    (one, processor), (same, twin) = made
    assert processor.tokenizer.get_vocab() == twin.tokenizer.get_vocab()
    weights = [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in (one, same)]
    assert torch.equal(*weights)
    assert len(weights[0]) < 300_000
    other = model_by_name("tiny-vision", texts=lambda: TEXTS, seed=2)[0]
    assert not torch.equal(weights[0], torch.cat([p.detach().flatten() for p in other.parameters()]))


def test_the_built_in_model_loads_from_its_folder_as_it_was_saved(tmp_path: Path) -> None:
    model, processor = model_by_name("tiny-vision", texts=lambda: TEXTS, seed=1)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    loaded, again = model_in_folder(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    [task] = sokoban.tasks("train", observation="image", tile=4, max_tasks=1)
    message = {"role": "user", "content": "This is the room.", "images": task.make_env().reset().images}
    assert VisionRenderer(processor).prompt([message]) == VisionRenderer(again).prompt([message])
    picture = pil_image(message["images"][0])
    pixels = [p.image_processor(images=[picture], return_tensors="pt")["pixel_values"] for p in (processor, again)]
    assert torch.equal(*pixels)


@pytest.mark.parametrize("tile", [4, 28])
def test_a_cell_of_a_room_is_one_token_at_any_picture_size_and_changes_the_logits(tile: int) -> None:
    model, processor = model_by_name("tiny-vision", texts=lambda: TEXTS, seed=1)
    tasks = sokoban.tasks("train", level="starter", observation="image", tile=tile, max_tasks=8)
    pictures = [task.make_env().reset().images for task in tasks]
    renderer = VisionRenderer(processor)
    prompts = [renderer.prompt([{"role": "user", "content": "This is the room.", "images": i}]) for i in pictures]
    assert len({tuple(prompt) for prompt in prompts}) == 1
    assert prompts[0].count(processor.image_token_id) == 36
    ids = torch.tensor([list(prompt) for prompt in prompts])
    with torch.no_grad():
        logits = model(input_ids=ids, **Pixels(model, processor).inputs(ids, pictures)).logits[:, -1]
    assert len({tuple(row) for row in logits.tolist()}) == len(set(pictures))


SHORT = ("run.steps=4", "rollout.num_tasks=2", "rollout.group_size=4", "rollout.max_turns=4", "eval.tasks=8")
SHORT += ("sft.episodes=8", "optim.decay=constant", "run.checkpoint_every=2", "algorithm.imitation.warm_steps=1")
SHORT += ("algorithm.imitation.admit_by_score=true", "algorithm.imitation.skip_invalid=false")
SHORT += ("algorithm.imitation.gate=old", "algorithm.imitation.fraction=1.0")


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("engine.lora_rank=2",)], ids=["weights", "adapter"])
def test_the_preset_trains_from_scratch_and_resumes_bit_for_bit(spear: Any, tmp_path: Path, more: tuple) -> None:
    def train(run: str, *settings: str) -> list[dict]:
        code, printed = spear("train", *settings, f"run.dir={tmp_path / run}")
        assert code == 0, printed
        return logged(tmp_path / run)

    whole = train("whole", "sokoban-vision-tiny", *SHORT, *more)
    assert more or any(step["replay/fired"] for step in whole), "nothing was replayed"
    train("halves", "sokoban-vision-tiny", *SHORT, *more, "run.steps=2")
    assert train("halves", "run.resume=true", "run.steps=4") == whole


@pytest.mark.slow
def test_the_paper_s_preset_runs_with_a_vision_language_model_and_refuses_a_text_model(
    spear: Any, tmp_path: Path
) -> None:
    few = ("paper-sokoban", "run.steps=1", "rollout.num_tasks=1", "rollout.group_size=2", "rollout.max_turns=2")
    few += ("rollout.max_new_tokens=4", "eval.tasks=2")
    code, printed = spear("train", *few, "engine.model=tiny-vision", f"run.dir={tmp_path / 'pictures'}")
    assert code == 0, printed
    for text, expected in (("image", 2), ("text", 0)):
        settings = ("engine.model=tiny-xs", f"task.options.observation={text}", f"run.dir={tmp_path / text}")
        code, printed = spear("train", *few, *settings)
        assert code == expected, printed
        assert ("task.options.observation=text" in printed) == bool(expected)
    code, printed = spear("train", "paper-sokoban", f"run.dir={tmp_path / 'none'}")
    assert code == 2
    assert "engine.model" in printed


def test_the_doctor_examines_a_vision_language_model(spear: Any, folder: Path) -> None:
    code, printed = spear("doctor", "paper-sokoban", f"engine.model={folder}", "engine.device=cpu")
    assert code == 0, printed
    assert "LlavaForConditionalGeneration" in printed
    assert "fits" in printed
