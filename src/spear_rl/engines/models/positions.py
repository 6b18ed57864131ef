"""How long a sequence a model has positions for, and whether rollout.max_context stays within it."""

import logging
from typing import Any

from spear_rl.errors import ConfigError

logger = logging.getLogger(__name__)

STRETCHED = ("linear", "dynamic")
"""Kinds of rope scaling whose factor multiplies max_position_embeddings; others name the scaled length there."""


def position_limit(config: Any) -> int | None:
    """Tokens of the longest sequence, rope scaling included; None if the config names none."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:
        return None
    longest = limit
    for rope in _ropes(config):
        kind, factor = rope.get("rope_type", rope.get("type")), float(rope.get("factor") or 1.0)
        if kind in STRETCHED:
            longest = max(longest, int(factor * limit))
        elif kind == "yarn":
            longest = max(longest, int(factor * (rope.get("original_max_position_embeddings") or limit)))
    return longest


def check_positions(config: Any, name: str, *, max_context: int, max_new_tokens: int, lenient: bool) -> None:
    """Refuse a max_context beyond the model's positions.

    Rotary positions go on beyond their limit, only less well, so that an answer may end there; a table of positions
    does not.

    Args:
        lenient: warn instead of refusing where positions go on: nobody asked for this max_context.
    """
    limit, is_table = position_limit(config), not _ropes(config)
    if limit is None or max_context + (max_new_tokens if is_table else 0) <= limit:
        return
    most = limit - max_new_tokens
    way_out = f"set rollout.max_context={most} or less" if most > 0 else "take a model that has more, or lower both"
    answer = f" and rollout.max_new_tokens={max_new_tokens}" if is_table or most <= 0 else ""
    sentence = f"rollout.max_context={max_context}{answer}: {name} has positions for {limit} tokens: {way_out}"
    if is_table or not lenient:
        raise ConfigError(sentence)
    logger.warning(sentence)


def _ropes(config: Any) -> list[dict[str, Any]]:
    """The rope settings of a text config: one for all layers, or one per kind of layer."""
    text = config.get_text_config()
    found = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    parts = [part for part in found.values() if isinstance(part, dict)] or [found]
    return [part for part in parts if part]
