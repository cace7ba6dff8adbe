#!/usr/bin/env bash
# Set up what condtok_mm runs on, and print the python that has it.
#
# usage: setup_env.sh [--stack onedl|openmmlab]
#
# An active virtual environment or conda environment is used if its stack works, and is
# the one that was asked for, if any was; nothing is installed into it. Otherwise .venv is
# made beside this project with the versions of requirements.txt (onedl, the maintained
# stack), or .venv-openmmlab with those of tools/requirements-openmmlab.txt; mmcv's
# operators are compiled for the torch that is there, which takes about ten minutes.
# Running it again goes on where it stopped. Progress goes to stderr.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
log=$root/.setup.log

say() { printf '%s\n' "$*" >&2; }
fail() {
    say "setup: $*"
    exit 1
}

asked=
if [ $# -gt 0 ]; then
    [ $# -eq 2 ] && [ "$1" = --stack ] ||
        fail "there is no argument '$*'; use --stack onedl or --stack openmmlab."
    asked=$2
fi
case "${asked:-onedl}" in
    onedl) venv=.venv requirements=$root/requirements.txt mim=onedl-mim ;;
    openmmlab)
        venv=.venv-openmmlab requirements=$root/tools/requirements-openmmlab.txt mim=openmim
        ;;
    *) fail "there is no stack '$asked'; use onedl or openmmlab." ;;
esac

requirement() { grep -E "^$1==" "$requirements"; }
mmcv=$(requirement '(onedl-)?mmcv')

# Import the whole stack and run an operator of mmcv, on the GPU too if torch has one.
works() {
    PYTHONPATH="$root" "$1" -W ignore "$root/tools/misc/check_env.py" >>"$log" 2>&1
}

has_asked_stack() {
    [ -z "$asked" ] || "$1" -m pip show -q "${mmcv%%==*}" >>"$log" 2>&1
}

# run WHAT COMMAND...: the command's output goes to the log; compilation shows its count.
run() {
    local what=$1
    shift
    say "setup: $what"
    local status=0
    "$@" 2>&1 | tee -a "$log" | while IFS= read -r line; do
        if [[ $line =~ ^[[:space:]]*(\[[0-9]+/[0-9]+\]) ]]; then
            printf '\rsetup: compiled %s ' "${BASH_REMATCH[1]}" >&2
        fi
    done || status=$?
    if [ "$status" -ne 0 ]; then
        say ""
        tail -n 15 "$log" >&2
        hint
        fail "could not $what; the whole output is in $log. Run the same command to go on."
    fi
}

hint() {
    if grep -qiE 'ensurepip is not available' "$log"; then
        say "setup: python's venv is missing (Debian: apt-get install python3-venv)."
    elif grep -qiE 'no space left' "$log"; then
        say "setup: the disk is full; torch and the build need about 12 GB."
    elif grep -qiE 'temporary failure in name|connection|timed out|no matching dist' "$log"; then
        say "setup: a package could not be fetched; is the network there, and PyPI reached?"
    elif grep -qiE 'g\+\+|gcc|cc1plus' "$log"; then
        say "setup: the compiler stopped; with little memory try MAX_JOBS=1."
    fi
}

: >"$log"
if [ -n "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ]; then
    active=$(command -v python)
    if has_asked_stack "$active" && works "$active"; then
        printf '%s\n' "$active"
        exit 0
    fi
    say "setup: the active environment lacks a working ${asked:+$asked }stack (see $log);" \
        "using $venv."
fi

python=$root/$venv/bin/python
exec 9>"$root/.setup.lock"
if command -v flock >/dev/null && ! flock -n 9; then
    say "setup: another setup is running; waiting for it."
    flock 9
fi
if [ -x "$python" ] && works "$python"; then
    printf '%s\n' "$python"
    exit 0
fi

base=${PYTHON:-python3}
command -v "$base" >/dev/null || fail "there is no $base; install Python 3.10 or newer."
"$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$("$base" --version) is too old; install Python 3.10 or newer, or set PYTHON."
command -v g++ >/dev/null || command -v c++ >/dev/null ||
    fail "there is no C++ compiler, which mmcv's operators need; install g++ (Debian: apt-get install g++)."
free_gb=$(df -Pk "$root" | awk 'NR == 2 {print int($4 / 1048576)}')
[ "$free_gb" -ge 12 ] || [ -x "$python" ] ||
    fail "$free_gb GB are free where 12 GB are needed for torch and the build."
if [ ! -x "$python" ]; then
    run "make $venv" "$base" -m venv "$root/$venv"
fi

run "install pip and setuptools" "$python" -m pip install -U pip wheel ninja packaging \
    "$(requirement setuptools)"
run "install torch (about two minutes)" "$python" -m pip install \
    "$(requirement torch)" "$(requirement torchvision)" "$(requirement numpy)"

if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    cuda=$("$python" -c 'import torch; print(torch.version.cuda)')
    compiler=$(nvcc --version 2>/dev/null | grep -oE 'release [0-9]+\.[0-9]+' | cut -d' ' -f2 || true)
    if [ "${compiler%%.*}" != "${cuda%%.*}" ]; then
        say "setup: WARNING: torch uses CUDA $cuda and nvcc is ${compiler:-missing}: mmcv would be"
        say "  built without GPU operators, and training on the GPU would fail. Install the CUDA"
        say "  $cuda toolkit, or take a prebuilt wheel where there is one for this torch:"
        say "  $python -m pip install -U $mim && $python -m mim install '$mmcv'"
        export FORCE_CUDA=0
    fi
fi

build_mmcv() {
    run "build mmcv's operators (about ten minutes on two cores)" env \
        MMCV_WITH_OPS=1 MAX_JOBS="${MAX_JOBS:-$(nproc)}" \
        "$python" -m pip install -v --no-build-isolation "$@" "$mmcv"
}
build_mmcv
if ! "$python" -W ignore -c 'import mmcv.ops' >>"$log" 2>&1; then
    say "setup: pip had a cached mmcv that was built for another torch; building it anew."
    build_mmcv --no-cache-dir --force-reinstall --no-deps
fi
say ""
run "install the OpenMMLab packages" "$python" -m pip install -r "$requirements"
run "install condtok_mm into $venv" \
    "$python" -m pip install --no-deps --no-build-isolation -e "$root"
works "$python" || {
    tail -n 5 "$log" >&2
    fail "everything is installed, but it does not work; the whole output is in $log."
}
printf '%s\n' "$python"
