#!/usr/bin/env bash
# outside_project_test.bash CMAKE BUILD SOURCE COMPILER
set -euo pipefail
cmake=$1 build=$2 source=$3 compiler=$4
folder=$(mktemp -d)
keeper=
cleanup() {
    [ -z "$keeper" ] || { kill "$keeper" 2>/dev/null; wait "$keeper"; } || true
    rm -rf "$folder"
}
trap cleanup EXIT
fail() { echo "FAILED: $*" >&2; exit 1; }

"$cmake" --install "$build" --component client --prefix "$folder/prefix" >"$folder/install.log"
[ ! -e "$folder/prefix/bin" ] || fail "the client's component brings programs"
! grep -rlE '#include [<"](torch|ATen|c10|cuda|clients/)' "$folder/prefix/include" ||
    fail "a public header includes what is not installed"
grep -rhoE '#include "[^"]+"' "$folder/prefix/include" | sort -u | while IFS='"' read -r _ header _; do
    [ -e "$folder/prefix/include/bulkhead/$header" ] || fail "$header is included by a public header, and not installed"
done

"$cmake" -S "$source/tests/install/outside_project" -B "$folder/app" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_CXX_COMPILER="$compiler" -DCMAKE_PREFIX_PATH="$folder/prefix" -DEXAMPLES="$source/clients/cpp/examples" \
    ${CCACHE:+-DCMAKE_CXX_COMPILER_LAUNCHER=$CCACHE} >"$folder/configure.log"
"$cmake" --build "$folder/app" -j2 >"$folder/build.log" || { cat "$folder/build.log"; fail "it does not build"; }
for program in infer async_infer dlpack_view open_gpu; do
    ! readelf -d "$folder/app/$program" | grep -E 'NEEDED.*(torch|c10|cuda)' || fail "$program links LibTorch or CUDA"
done

cat >"$folder/fleet.yaml" <<FLEET
version: 1
defaults: {device: cpu, threads: 1}
models:  # any file will do: the minimal worker reads none
  echo: {file: $build/minimal/bin/bulkhead-worker, runtime: torchscript, inputs: {x: {dtype: float32, shape: ["0..65536"]}}, outputs: {y: {dtype: float32, shape: ["0..65536"]}}, warmup: {x: [4]}}
  table: {file: $build/minimal/bin/bulkhead-worker, runtime: torchscript, inputs: {x: {dtype: float32, shape: [2, 3]}}, outputs: {y: {dtype: float32, shape: [2, 3]}}, warmup: {x: [2, 3]}}
FLEET
export BULKHEAD_SOCKET=$folder/run/control.sock
"$build/minimal/bin/bulkheadd" --socket "$BULKHEAD_SOCKET" "$folder/fleet.yaml" >"$folder/daemon.log" 2>&1 &
keeper=$!
# The keeper listens at once; what comes before its supervisor waits.
for _ in $(seq 200); do [ -S "$BULKHEAD_SOCKET" ] && break; sleep 0.05; done

expect() {
    local wanted=$1 said
    shift
    said=$("$@" 2>&1) || { cat "$folder/daemon.log"; fail "$*: $said"; }
    grep -q "$wanted" <<<"$said" || fail "$* said: $said"
}
expect '16 bytes, the first value' "$folder/app/infer" echo x 4
expect '4 of 4 answered' "$folder/app/async_infer" echo x 4 4
expect 'has 2 dimensions, its second value is 1' "$folder/app/dlpack_view" table x
expect 'GPU-........-\|libcuda.so.1' "$folder/app/open_gpu"
echo "an outside project builds against the installed client, and runs"
