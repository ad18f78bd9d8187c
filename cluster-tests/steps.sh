#!/usr/bin/env bash
# steps.sh STEP...: runs targets of the Makefile in order, and targets joined by "+" side by side. A step that fails does not keep
# later ones from running, unless its name ends with "!". The last lines give the time of each step, and what failed by name.
set -uo pipefail

logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
# What runs in the background does not hear of Ctrl-C by itself.
trap 'trap - TERM; kill 0' INT TERM
# Lines of what failed tests said, at most.
TOLD_MAX=60
summary=()
failed=()

# Runs one target; its output goes to a file, and with a second argument to the terminal too.
run() {
    local begun=$SECONDS status=0
    if [[ ${2:-} ]]; then
        "${MAKE:-make}" --no-print-directory "$1" 2>&1 | tee "$logs/$1" || status=$?
    else
        "${MAKE:-make}" --no-print-directory "$1" >"$logs/$1" 2>&1 || status=$?
    fi
    echo "$status $((SECONDS - begun))" >"$logs/$1.result"
}

note() {
    local status seconds
    read -r status seconds <"$logs/$1.result"
    if [[ $status == 0 ]]; then
        summary+=("$(printf '%5d s  passed  %s' "$seconds" "$1")")
    else
        summary+=("$(printf '%5d s  FAILED  %s' "$seconds" "$1")")
        failed+=("$1")
    fi
}

finish() {
    local step
    echo
    printf '%s\n' "${summary[@]}"
    printf '%5d s  in all\n' "$SECONDS"
    for step in "${failed[@]}"; do
        printf '\n%s failed' "$step"
        # A test program without tests of its own, or one that was aborted, is named by cargo alone.
        grep -hE '^test .* FAILED$|^    `-p .*`$|^error: could not compile' "$logs/$step" |
            sed -E 's/^test (.*) \.\.\. FAILED$/\1/; s/^ */  /' | sort -u | { echo; cat; }
        # How each test ended: where it panicked, and what it said, whose middle is left out where it is long.
        sed -nE '/^---- .* stdout ----$/p; /^thread .* panicked at /,/^(note: run with .*|stack backtrace:|)$/{/^(note: run with|stack backtrace:|$)/!p}' "$logs/$step" |
            sed -E 's/^(.{600}).{100,}(.{300})$/\1 … \2/; s/^/    /' | head -n "$TOLD_MAX"
    done
    exit $((${#failed[@]} > 0))
}

for group in "$@"; do
    IFS=+ read -ra marked <<<"$group"
    names=("${marked[@]%!}")
    # Of those side by side the first is shown while it runs, the others when all have ended.
    for name in "${names[@]:1}"; do run "$name" & done
    printf '\n=== %s\n' "${names[0]}"
    run "${names[0]}" shown
    wait
    for name in "${names[@]:1}"; do
        printf '\n=== %s\n' "$name"
        cat "$logs/$name"
    done
    for name in "${names[@]}"; do note "$name"; done
    for name in "${marked[@]}"; do
        [[ $name != *! || " ${failed[*]:-} " != *" ${name%!} "* ]] || finish
    done
done
finish
