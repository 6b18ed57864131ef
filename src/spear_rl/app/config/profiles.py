"""Profiles: SPEAR as published, or ours, in one setting. `config.merged` says what goes before what."""

from typing import Any

PROFILES: dict[str, dict[str, Any]] = {
    "paper": {
        "entropy_floor": 0.0,
        "bonus": {"mode": "cosine", "count": "turns"},
        "imitation": {
            "weight": 1.0,
            "schedule": "steps",
            "fraction": 0.25,
            "max_age": 5,
            "baseline": "percentile",
            "percentile": 50.0,
            "per_family": False,
            "priority": [],
            "gate": "both",
            "update": "joint",
            "admit_by_score": True,
            "skip_invalid": False,
            "scale_by_rows": False,
            "max_second_moment": 0.0,
            "keep_step_part": False,
            "join_lost": False,
        },
    },
    "spear": {},
}
"""Profile -> values of settings under `algorithm`; those said where the profile is named, or later, override them.
`spear` is the defaults.

None that may be unset: a file cannot say so, and a stored configuration would take the profile's value.
"""
