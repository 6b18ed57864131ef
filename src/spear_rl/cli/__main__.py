"""python -m spear_rl.cli"""

from spear_rl.cli import main

if __name__ == "__main__":
    main()
