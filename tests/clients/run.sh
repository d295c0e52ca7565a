#!/bin/bash
# Runs COMMAND next to the server of tests/clients/server.py, whose base URL is in URL.
# Usage: tests/clients/run.sh PYTHON COMMAND [ARGUMENT...]
set -euo pipefail
python=$1
shift
coproc SERVER { exec "$python" -m tests.clients.server; }
read -r URL <&"${SERVER[0]}"
export URL
"$@"
