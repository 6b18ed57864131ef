"""A whole RL step on the same work: ours, TRL's GRPOTrainer with vLLM colocated, and verl with vLLM.

    python benchmarks/rl_step_peers.py --model FOLDER --vllm-path SITE_PACKAGES            # vLLM and TRL in it
    python benchmarks/rl_step_peers.py --model FOLDER --only rl_step:verl --timeout 560 --out verl.json \\
        --vllm-path SITE_PACKAGES
    python benchmarks/rl_step_peers.py --device cpu --model tiny                           # a rehearsal: ours and TRL

verl takes minutes to start and runs only when named, in a command of its own. Prints one table in Markdown and writes
rl_step_peers.json; `python -m benchmarks.gpu --join FILES` makes one table of several. What is measured:
benchmarks/gpu/rl_step.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gpu.run import main

DEFAULTS = ["--timeout", "240", "--total", "570", "--out", "rl_step_peers.json"]
DEFAULTS += ["--only", "rl_step:base", "rl_step:spear", "rl_step:trl-vllm"]
if "cpu" in sys.argv:
    DEFAULTS += ["rl_step:trl"]  # TRL with transformers' generate

if __name__ == "__main__":
    main(DEFAULTS, __doc__)
