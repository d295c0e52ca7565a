#!/bin/bash
# Usage: tests/clients/run.sh PYTHON_OF_THE_SERVER PYTHON_OF_THE_CLIENTS [PACKAGE...]
set -euo pipefail
server=$1 clients=$2
shift 2
coproc SERVER { exec "$server" -m tests.clients.server; }
read -r url <&"${SERVER[0]}"
"$clients" tests/clients/check.py "$url" "$@"
