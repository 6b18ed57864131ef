"""python -m spear_rl.integrations.verl is `spear verl`."""

import sys

from spear_rl.cli import main

sys.argv.insert(1, "verl")
main()
