"""Profiles: named values of the switches that go beyond the paper. They lie under what a preset or a user sets."""

from typing import Any

PROFILES: dict[str, dict[str, Any]] = {
    "paper": {
        "entropy_floor": 0.0,
        "bonus": {"mode": "cosine"},
        "imitation": {
            "baseline": "percentile",
            "priority": [],
            "schedule": "steps",
            "max_second_moment": 0.0,
            "per_family": False,
            "admit_by_score": True,
            "skip_invalid": False,
            "scale_by_rows": False,
        },
    },
    "spear": {},
    "strong": {
        "bonus": {"mode": "none"},
        "imitation": {
            "weight": 2.0,
            "schedule": "entropy",
            "entropy_share": 0.8,
            "fraction": 1.0,
            "max_age": 10,
            "baseline": "siblings",
            "update": "joint",
            "admit_by_score": False,
            "skip_invalid": True,
            "scale_by_rows": True,
        },
    },
}
"""Profile -> values of settings under `algorithm`; a preset, a file or the command line overrides them.

None that may be unset: a file cannot say so, and a stored configuration would take the profile's value.
"""
