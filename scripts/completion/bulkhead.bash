# Completion of `bulkhead` for bash: commands, options, and the names of the daemon's models. What
# commands and options there are, it reads in `--help`.
#
#   source scripts/completion/bulkhead.bash

# $where: the options that say which daemon to ask.
_bulkhead_models() {
    "$program" "${where[@]}" --json ps 2>/dev/null | grep -o '"model":"[^"]*"' | cut -d'"' -f4 | sort -u
}

_bulkhead_gpus() { "$program" "${where[@]}" --json gpus 2>/dev/null | grep -o '"uuid":"[^"]*"' | cut -d'"' -f4; }

# The type of an option's value, as $help has it after the option's names: "  -n,--lines INT:…".
# Empty for a flag.
_bulkhead_value() {
    [[ ! $1 =~ ^--?[a-z_-]+$ ]] || sed -nE "s/^  ([^ ]+,)?$1(,[^ ]+)? ([A-Z]+)([ :=.].*)?\$/\3/p" <<<"$help"
}

# Prints the completions of $word, one a line.
_bulkhead_completions() {
    case $(_bulkhead_value "$previous"):$previous in
    PATH:* | FILE:* | *:--output | *:-o) compgen -f -- "$word" ;;
    *:--lift) compgen -W "$(_bulkhead_gpus)" -- "$word" ;;
    *:--do-sample) compgen -W 'true false' -- "$word" ;;
    [A-Z]*:*) ;;
    *)
        if [[ $word == -* ]]; then
            compgen -W "$(grep -oE '^  (-[a-z],)?--[a-z-]+' <<<"$help" | grep -o -- '--.*')" -- "$word"
        elif [ -z "$command" ]; then
            compgen -W "$(sed -n '/^Subcommands:/,/^$/s/^  \([a-z]*\) .*/\1/p' <<<"$help")" -- "$word"
        else
            case $(sed -n '/^Positionals:/{n;p}' <<<"$help"):$named in
            '  NAME TEXT ...'* | '  '[NT]*:0) compgen -W "$(_bulkhead_models)" -- "$word" ;;
            '  F'*) compgen -f -X '!*.y?(a)ml' -- "$word"; compgen -d -S / -- "$word" ;;
            esac
        fi
        ;;
    esac
}

_bulkhead() {
    local word=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]}
    local program=${COMP_WORDS[0]/#\~/$HOME} command='' named=0 where=() help i
    help=$("$program" --help 2>/dev/null)
    for ((i = 1; i < COMP_CWORD; i++)); do
        case ${COMP_WORDS[i]} in
        --socket) where=(--socket "${COMP_WORDS[++i]}") ;;
        -*) [ -z "$(_bulkhead_value "${COMP_WORDS[i]}")" ] || ((++i)) ;;
        *)
            if [ -n "$command" ]; then
                ((++named))
            else
                command=${COMP_WORDS[i]}
                help+=$'\n'$("$program" "$command" --help 2>/dev/null)
            fi
            ;;
        esac
    done
    mapfile -t COMPREPLY < <(_bulkhead_completions)
}

complete -F _bulkhead bulkhead
