#!/usr/bin/env bash
# Completes as a shell would, with a `bulkhead` that knows two models: SOURCE_FOLDER PROGRAM.
set -euo pipefail
source "$1/scripts/completion/bulkhead.bash"
built=$2

bulkhead() {
    case "$*" in
    '--json gpus') echo '{"gpus":[{"index":0,"uuid":"GPU-1"},{"index":1,"uuid":"GPU-2"}]}' ;;
    '--json ps') echo '[{"model":"minilm","replica":0},{"model":"silero-vad","replica":0},{"model":"minilm","replica":1}]' ;;
    *) "$built" "$@" ;;
    esac
}

failed=0
# expect "WORDS TYPED" "COMPLETIONS": the last word is the one under the cursor.
expect() {
    IFS=' ' read -r -a COMP_WORDS <<<"${1%|}"
    [[ $1 == *' |' ]] && COMP_WORDS+=('')
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    COMPREPLY=()
    _bulkhead bulkhead "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
    local got
    got=$(printf '%s\n' "${COMPREPLY[@]-}" | sort | xargs)
    if [ "$got" != "$2" ]; then
        printf 'after "%s": got "%s", want "%s"\n' "$1" "$got" "$2"
        failed=1
    fi
}

expect 'bulkhead l|' 'load logs'
expect 'bulkhead --json un|' 'unload'
expect 'bulkhead load |' 'minilm silero-vad'
expect 'bulkhead load m|' 'minilm'
expect 'bulkhead unload --a|' '--all'
expect 'bulkhead why silero-vad |' ''
expect 'bulkhead restart silero-vad |' 'minilm silero-vad'
expect 'bulkhead ps --w|' '--watch'
expect 'bulkhead top --o|' '--once'
expect 'bulkhead infer --rep|' '--repeat'
expect 'bulkhead infer --ret|' '--retry-safe'
expect 'bulkhead generate --top|' '--top-k --top-p'
expect 'bulkhead generate --seed 7 m|' 'minilm'
expect 'bulkhead generate m --do-sample |' 'false true'
expect 'bulkhead crashes |' 'minilm silero-vad'
expect 'bulkhead crashes --limit 3 m|' 'minilm'
expect 'bulkhead upgrade --s|' '--socket --supervisor-only'
expect 'bulkhead re|' 'reload restart'
expect 'bulkhead gpus --lift |' 'GPU-1 GPU-2'
expect 'bulkhead load --deadline |' ''
expect 'bulkhead doctor step.py:decode |' ''
expect 'bulkhead --socket /tmp/x.sock in|' 'infer info'
exit $failed
