# Completion of `bulkhead` for bash: commands, options, and the names of the daemon's models.
#
#   source scripts/completion/bulkhead.bash

_bulkhead_models() {
    # The options that say which daemon to ask are passed on.
    bulkhead "$@" --json ps 2>/dev/null | grep -o '"model":"[^"]*"' | cut -d'"' -f4 | sort -u
}

_bulkhead_gpus() {
    bulkhead "$@" --json gpus 2>/dev/null | grep -o '"uuid":"[^"]*"' | cut -d'"' -f4
}

_bulkhead() {
    local word=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]}
    local commands='up down ps top load unload restart infer generate logs events why plan pin crashes gpus info reload upgrade validate doctor'
    local command='' named=0 where=() i
    for ((i = 1; i < COMP_CWORD; i++)); do
        case ${COMP_WORDS[i]} in
        --socket) where=(--socket "${COMP_WORDS[++i]}") ;;
        --deadline | --lines | --count | --repeat | --method | --client | --input | --param | --output | --limit | --lift | --model | --inputs | --python | --fleet | --baseline | --write-baseline) ((++i)) ;;
        --tokens | --temperature | --top-k | --top-p | --min-p | --repetition-penalty | --seed | --max-new-tokens) ((++i)) ;;
        --guidance | --stop | --stop-also | --banned | --forced | --do-sample) ((++i)) ;;
        -*) ;;
        *) if [ -z "$command" ]; then command=${COMP_WORDS[i]}; else ((++named)); fi ;;
        esac
    done

    case $previous in
    --socket | --output | -o)
        mapfile -t COMPREPLY < <(compgen -f -- "$word")
        return
        ;;
    --lift)
        mapfile -t COMPREPLY < <(compgen -W "$(_bulkhead_gpus "${where[@]}")" -- "$word")
        return
        ;;
    --deadline | --lines | --count | --repeat | --method | --client | --input | --param | --limit | -n | -m | -i | -p | -t) return ;;
    --tokens | --temperature | --top-k | --top-p | --min-p | --repetition-penalty | --seed | --max-new-tokens) return ;;
    --guidance | --stop | --stop-also | --banned | --forced) return ;;
    --do-sample)
        mapfile -t COMPREPLY < <(compgen -W 'true false' -- "$word")
        return
        ;;
    esac

    local options='--socket --json --help' names=''
    case $command in
    '') names=$commands options+=' --version' ;;
    ps) options+=' --watch' ;;
    top) options+=' --once' ;;
    load) options+=' --all --deadline' names=many ;;
    unload | restart) options+=' --all' names=many ;;
    infer) options+=' --input --param --output --method --repeat --deadline --client --retry-safe' names=one ;;
    generate)
        options+=' --tokens --input --param --method --deadline --client --temperature --top-k --top-p --min-p --seed'
        options+=' --repetition-penalty --max-new-tokens --guidance --do-sample --stop --stop-also --banned --forced --ignore-stop'
        names=one
        ;;
    logs) options+=' --lines --follow' names=one ;;
    events) options+=' --count --follow' names=many ;;
    crashes) options+=' --limit --full' names=one ;;
    gpus) options+=' --lift' ;;
    upgrade) options+=' --supervisor-only' ;;
    why | plan) names=one ;;
    pin) options+=' --off' names=one ;;
    doctor) options+=' --inputs --python --fleet --baseline --write-baseline --deadline --sarif --compile --gpu' names=one ;;
    up | validate)
        [[ $word == -* ]] || mapfile -t COMPREPLY < <(compgen -f -X '!*.y?(a)ml' -- "$word"; compgen -d -S / -- "$word")
        ;;
    esac
    if [[ $word == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$options" -- "$word")
        return
    fi
    [ "$names" = one ] && [ "$named" -gt 0 ] && names=''
    [ "$names" = one ] || [ "$names" = many ] && names=$(_bulkhead_models "${where[@]}")
    [ -z "$names" ] || mapfile -t COMPREPLY < <(compgen -W "$names" -- "$word")
}

complete -F _bulkhead bulkhead
