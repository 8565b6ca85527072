#!/bin/sh
# What the errors of venv and pip, which come before it, don't say: explain_failed_setup.sh VENV
free() { df -Ph "$1" | sed 1d | { read -r _ _ _ available _ && echo "$available"; }; }

temporary=${TMPDIR:-/tmp}
echo "error: $1 is not complete: the lines above say why. Mend it, and run make setup again.
- 'No matching distribution' after 'Retrying': the network does not answer. Set HTTPS_PROXY, or a mirror in PIP_INDEX_URL.
- 'No space left', or ensurepip fails: $1 takes 7 GB (10 with ENGINE=vllm, 4 with the CPU build of torch), and $temporary needs 2 GB; free
  are $(free "$(dirname "$1")") and $(free "$temporary"). VENV and TMPDIR choose other places." >&2
