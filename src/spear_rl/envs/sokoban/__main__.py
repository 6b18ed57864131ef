"""`python -m spear_rl.envs.sokoban` rebuilds the panels and writes their manifest; `--check` compares them."""

import sys

from spear_rl.envs.sokoban.panel import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
