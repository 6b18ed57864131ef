"""Multi-turn rollouts, ours beside vLLM: prompts of ALFWorld's lengths, 128 episodes, prefix reuse and log-probs on.

    python benchmarks/agentic_rollouts.py --model FOLDER --vllm-path VLLM_SITE_PACKAGES
    python benchmarks/agentic_rollouts.py --device cpu --model tiny                        # a rehearsal

Prints one table in Markdown and writes agentic_rollouts.json. What is measured: benchmarks/gpu/agentic.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gpu.run import main

DEFAULTS = ["--only", "agentic", "--timeout", "230", "--total", "570", "--out", "agentic_rollouts.json"]

if __name__ == "__main__":
    main(DEFAULTS, __doc__)
