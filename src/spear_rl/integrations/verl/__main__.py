"""python -m spear_rl.integrations.verl [check | show] [PRESET | TOML] [SECTION.KEY=VALUE]... [-- VERL.KEY=VALUE...]"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from spear_rl.errors import UserError
from spear_rl.integrations.verl.launch import checked, preset, verl_settings, write_files


def main(arguments: list[str]) -> None:
    """Check; show verl's settings; or write the files verl needs and become verl."""
    verb = arguments.pop(0) if arguments[:1] in (["check"], ["show"]) else ""
    if verb == "check":
        print(checked())
        return
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    source = next((word for word in arguments[:cut] if "=" not in word), None)
    config, own = preset(source, [word for word in arguments[:cut] if "=" in word])
    folder = Path(config.run.dir).absolute()
    theirs = dict(word.split("=", 1) for word in arguments[cut + 1 :])
    keys = verl_settings(config, folder, own | theirs)
    words = [f"{key}={value if key in theirs else json.dumps(value)}" for key, value in keys.items()]
    if verb == "show":
        print("\n".join(words))
        return
    print(checked(), flush=True)
    write_files(config, folder)
    os.execv(sys.executable, [sys.executable, "-m", "verl.trainer.main_ppo", *words])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
