"""Expands a GGUF file into a plain checkpoint in float32, which can be quantized online.

python -m tools.expand_gguf FILE.gguf DIRECTORY
"""

import argparse
from pathlib import Path

from workers.weights.gguf import convert


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools.expand_gguf", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("directory", type=Path, help="is made, and must not exist")
    args = parser.parse_args()
    args.directory.mkdir(parents=True)
    convert(args.file, args.directory, lambda phase, done, total: None, keep_integers=False)


if __name__ == "__main__":
    main()
