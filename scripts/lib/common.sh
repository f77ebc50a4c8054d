# Sourced by the scripts beside this folder: where things are, and how a step is told.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
build=$root/build
python=$build/venv/bin/python
jobs=$(nproc)
# Paths below the tree count relative to it, so a clone elsewhere finds what another has compiled.
export CCACHE_BASEDIR=$root CCACHE_NOHASHDIR=1

if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then bold=$'\e[1m' dim=$'\e[2m' plain=$'\e[0m'; else bold='' dim='' plain=''; fi

# Seconds since the epoch, with milliseconds.
now() { date +%s.%3N; }
# The time since $1, as "1.234 s".
since() { awk -v a="$1" -v b="$(now)" 'BEGIN { printf "%.3f s", b - a }'; }

say() { printf '%s\n' "${bold}$*${plain}"; }
fail() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# The comment at the head of the script, and the end:
# `case "${1:-}" in --help | -h) show_help ;; esac`
show_help() {
    awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "$0"
    exit
}

# Keeps what comes in the file $1, and shows how far it is on a terminal: "[120/260]", as
# ninja says it.
keep_and_show() {
    if [ -z "$dim" ]; then
        cat >"$1"
        return
    fi
    local said
    while IFS= read -r said; do
        printf '%s\n' "$said"
        if [[ $said =~ ^\[[0-9]+/[0-9]+\] ]]; then printf '%s\e[%dD' "${BASH_REMATCH[0]}" ${#BASH_REMATCH[0]} >&3; fi
    done 3>&1 >"$1"
    printf '\e[K'
}

# quietly NAME COMMAND...: one line and the time; the whole output only when it fails.
quietly() {
    local name=$1 log start
    shift
    mkdir -p "$build/log"
    log=$build/log/$(printf '%s' "$name" | tr -c 'a-zA-Z0-9\n' '-').log
    start=$(now)
    printf '  %-44s ' "$name"
    if "$@" 2>&1 | keep_and_show "$log"; then
        printf '%s\n' "$(since "$start")"
    else
        printf 'failed after %s\n\n' "$(since "$start")"
        tail -n 60 "$log" >&2
        fail "$name failed; the whole output is in ${log#"$root"/}"
    fi
}

# beside COMMAND...: in the background; `rejoin` waits for its end and prints what it printed. If the
# script ends first, the command is ended.
beside() {
    mkdir -p "$build/log"
    beside_log=$build/log/beside-$BASHPID.log
    set -m  # a process group of its own, which can be ended as a whole
    (dim='' "$@") >"$beside_log" 2>&1 &
    beside=$!
    set +m
    trap 'kill -- -$beside 2>/dev/null || true; rm -f "$beside_log"' EXIT
}
rejoin() {
    local status=0
    wait "$beside" || status=$?
    trap - EXIT
    cat "$beside_log"
    rm -f "$beside_log"
    return $status
}

# both NAME COMMAND... -- NAME COMMAND...: as `quietly`, side by side, and told one after the other.
# Where one fails, the other is brought to its end too.
both() {
    local first=() status=0
    while [ "$1" != -- ]; do first+=("$1") && shift; done
    shift
    beside quietly "$@"
    (quietly "${first[@]}") || status=$?
    rejoin || status=$?
    return $status
}

# configure ON|OFF: with the models of worker/ and with tests, or without.
configure() {
    cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release "-DBULKHEAD_WORKER=$1" "-DBULKHEAD_TESTS=$1"
}
is_configured() { [ -f "$build/build.ninja" ] && grep -qs '^BULKHEAD_WORKER:BOOL=ON' "$build/CMakeCache.txt"; }
# Of a first build most is new: looked up without a run of the preprocessor.
compile_first() { CCACHE_DEPEND=1 cmake --build "$build" -j "$jobs" "$@"; }
compile_without_libtorch() { configure OFF && compile_first --target bulkhead bulkheadd bulkhead-supervisor; }

# install_and_configure: `install_options` are those of scripts/install. While pip brings LibTorch,
# what needs none of it is compiled, if nothing has been built yet.
install_options=()
compiling=("compiling (${jobs} jobs)" cmake --build "$build" -j "$jobs")
install_and_configure() {
    if is_configured; then
        "$root/scripts/install" ${install_options[@]+"${install_options[@]}"}
        return
    fi
    "$root/scripts/install" --debian
    beside "$root/scripts/install" --python ${install_options[@]+"${install_options[@]}"}
    quietly "compiling what needs no LibTorch" compile_without_libtorch
    rejoin
    rm -f "$build/build.ninja"  # a failure leaves nothing that looks configured
    quietly "configuring" configure ON
    compiling=("compiling the rest (${jobs} jobs)" compile_first)
}

# install_and_compile [TARGET...]: all targets where none is named.
install_and_compile() {
    install_and_configure
    say "Building into build/"
    quietly "${compiling[@]}" ${1:+--target "$@"}
}

# The same beside the preparation of models, which leaves a part of two CPUs idle if OpenMP's threads
# wait asleep.
prepare_models=("preparing the models" "$python" "$root/scripts/models/prepare.py" "$build/models")
install_and_build() {
    install_and_configure
    say "Building into build/"
    OMP_WAIT_POLICY=passive both "${compiling[@]}" ${1:+--target "$@"} -- "${prepare_models[@]}"
}
