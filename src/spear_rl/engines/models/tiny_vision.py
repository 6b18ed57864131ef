"""A vision-language model from scratch, small enough to learn Sokoban's pictures on a CPU in minutes."""

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import torch

from spear_rl.engines.models.tiny import TINY_VISION, tiny_tokenizer
from spear_rl.errors import MissingExtraError

CELLS, PATCH = 6, 4
"""A picture becomes 6 x 6 patches of 4 x 4 pixels: one token per cell of a room of 6 x 6."""
WIDTH = 64
IMAGE = "<|image|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|image|>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tiny_processor(texts: Iterable[str]) -> Any:
    """A tokenizer with the words of `texts`, and an image processor that makes every picture 24 x 24 pixels."""
    if find_spec("PIL") is None:
        raise MissingExtraError(f"engine.model={TINY_VISION} needs Pillow: pip install 'spear-rl[vision]'")
    import transformers

    # Releases before the split into Pillow and torchvision have the former under the plain name.
    kind = getattr(transformers, "CLIPImageProcessorPil", None) or transformers.CLIPImageProcessor
    tokenizer = tiny_tokenizer(texts)
    tokenizer.add_tokens(IMAGE, special_tokens=True)
    side = {"height": CELLS * PATCH, "width": CELLS * PATCH}
    return transformers.LlavaProcessor(
        kind(size=side, do_center_crop=False, image_mean=[0.5] * 3, image_std=[2.5] * 3),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # CLIP's class token, which LLaVA leaves out
        image_token=IMAGE,
        chat_template=CHAT_TEMPLATE,
    )


def tiny_vision_model(processor: Any, *, seed: int = 0) -> Any:
    """A LLaVA (CLIP's vision tower, a projector, Qwen2) with random weights drawn from `seed`.

    One layer looks at the picture and three read its cells in order. CLIP draws the embeddings of patches and of their
    places from one scale: small pixel values and a large scale keep a cell's place visible beside its colours. In trial
    runs this made the model learn several times as fast.
    """
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, Qwen2Config

    tokenizer = processor.tokenizer
    shape = {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_attention_heads": 4,
    }
    text = Qwen2Config(
        vocab_size=-(-len(tokenizer) // 8) * 8,
        num_hidden_layers=3,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        initializer_range=WIDTH**-0.5,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        **shape,
    )
    vision = CLIPVisionConfig(
        num_hidden_layers=1,
        image_size=CELLS * PATCH,
        patch_size=PATCH,
        projection_dim=WIDTH,
        initializer_factor=4.0,
        initializer_range=0.06,
        **shape,
    )
    config = LlavaConfig(
        text_config=text,
        vision_config=vision,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_token_id=processor.image_token_id,
        image_seq_length=CELLS**2,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlavaForConditionalGeneration(config)
