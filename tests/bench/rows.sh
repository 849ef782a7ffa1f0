# Functions of the benchmarks' scripts, which set `bench`, the name of their rows in build/bench.jsonl.
median() { sort -g | awk '{ v[NR] = $1 } END { if (NR) print v[int((NR + 1) / 2)] }'; }
ratio() { awk -v a="$1" -v b="$2" 'BEGIN { printf("%.2f", a / b) }'; }
row() { # CASE UNIT OURS PEER|- THEIRS|null RATIO|null [TEXT] [JSON]: text for the end of the line, more JSON fields
    peer="\"$4\""; [ "$4" != - ] || peer=null
    printf '%-44s %12s %-10s %-22s %12s %7s%s\n' "$1" "$3" "$2" "$4" "$5" "$6" "$7"
    printf '{"bench": "%s", "case": "%s", "unit": "%s", "hpml": %s, %s"peer": %s, "peer_value": %s, "ratio": %s}\n' \
        "$bench" "$1" "$2" "$3" "$8" "$peer" "$5" "$6" >>build/bench.jsonl
}
