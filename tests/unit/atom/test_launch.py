"""Closed standard streams are /dev/null, here and in child processes."""

import subprocess
import sys

_CODE = """
import subprocess, sys
from atom.launch import open_standard_streams
open_standard_streams()
print("lost", file=sys.stderr)
child = "import os, sys; [os.fstat(fd) for fd in range(3)]; print('lost', file=sys.stderr); print('done')"
print(subprocess.check_output([sys.executable, "-c", child], text=True), end="")
"""


def test_closed_standard_streams() -> None:
    command = ["sh", "-c", 'exec "$0" -c "$1" 0<&- 2>&-', sys.executable, _CODE]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60)
    assert (found.stdout, found.returncode) == ("done\n", 0)
