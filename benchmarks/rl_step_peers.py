"""A whole RL step on the same work: ours, TRL's GRPOTrainer with vLLM colocated, and verl with vLLM.

    python benchmarks/rl_step_peers.py --model FOLDER --vllm-path SITE_PACKAGES            # vLLM, TRL and verl in it
    python benchmarks/rl_step_peers.py --model FOLDER --only rl_step:verl --timeout 590 --vllm-path SITE_PACKAGES
    python benchmarks/rl_step_peers.py --device cpu --model tiny                           # a rehearsal: ours and TRL

verl and TRL 1.16 cannot share an environment, and verl takes minutes to start: give it a command of its own. Prints
one table in Markdown and writes rl_step_peers.json. What is measured: benchmarks/gpu/rl_step.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gpu.run import main

DEFAULTS = ["--only", "rl_step", "--timeout", "300", "--total", "590", "--out", "rl_step_peers.json"]
if "cpu" not in sys.argv:  # transformers' generate behind TRL is for the rehearsal
    DEFAULTS += ["--without", "rl_step:trl"]

if __name__ == "__main__":
    main(DEFAULTS, __doc__)
