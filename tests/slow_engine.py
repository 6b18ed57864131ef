"""An engine whose updates take as many seconds as SLOW_UPDATES says, for tests of signals."""

from __future__ import annotations

import os
import time
from typing import Any

from spear_rl.engines.hf import HFEngine


class SlowEngine(HFEngine):
    def update(self, terms: Any) -> Any:
        if seconds := os.environ.get("SLOW_UPDATES"):
            print("updating", flush=True)
            end = time.monotonic() + float(seconds)
            while time.monotonic() < end:
                time.sleep(0.01)
        return super().update(terms)


def make(**parts: Any) -> SlowEngine:
    return SlowEngine(**parts)
