"""One update: our packed training with shared prefixes beside plain transformers (SDPA, flash-attn) and TRL's update.

    python benchmarks/training_peers.py --model random-0.5b --size training:micro-batch-tokens=16384
    python benchmarks/training_peers.py --model FOLDER --size training:layout=turns        # rows that share nothing
    python benchmarks/training_peers.py --device cpu --model tiny                          # a rehearsal

Rows are an episode's turns (64 episodes of 16 turns, groups of 8). Prints one table in Markdown and writes
training_peers.json. What is measured: benchmarks/gpu/training.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gpu.run import main

DEFAULTS = ["--only", "training", "--without", "training:plain-mixed", "--size", "training:layout=log"]
DEFAULTS += ["--size", "training:repeats=3", "--timeout", "200", "--total", "580", "--out", "training_peers.json"]

if __name__ == "__main__":
    main(DEFAULTS, __doc__)
