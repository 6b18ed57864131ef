"""Write the model as a plain transformers folder once, so that every part loads the very same one, and quickly."""

from __future__ import annotations

from pathlib import Path

from benchmarks.gpu.machine import parser
from benchmarks.gpu.workload import loaded


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("folder", type=Path)
    arguments = asked.parse_args()
    model, tokenizer = loaded(arguments.model)
    model.save_pretrained(arguments.folder)
    tokenizer.save_pretrained(arguments.folder)


if __name__ == "__main__":
    main()
