# wrong.awk: prints a wrong solution of an exercise:
#     awk -v number=2 -f wrong.awk tests/exercises/05_ring.wrong examples/exercises/05_ring/solution.c
# The .wrong file lists mistakes. Each begins with a line "# title". Lines "- text" are consecutive lines of the
# solution, which the lines "+ text" that follow replace; "@ name" stands for the whole region /* >> name */. Blanks in
# front do not count. A line "! text" is a part of the checker's message. Lines before the first title are comments.
function trim(s) { sub(/^ +/, "", s); return s }
function fits(h, at,    i) { # is hunk h at line `at` of the solution?
    for (i = 1; i <= olds[h]; i++) if (trim(line[at + i - 1]) != old[h, i]) return 0
    return olds[h] > 0
}
FNR == NR {
    if (/^# /) mistake++
    if (mistake != number || !/^[-+@] ?/) next
    if (!/^\+/ && (hunks == 0 || news[hunks] > 0)) hunks++
    if (/^-/) old[hunks, ++olds[hunks]] = trim(substr($0, 3))
    if (/^\+/) new[hunks, ++news[hunks]] = substr($0, 3)
    if (/^@/) region[hunks] = substr($0, 3)
    next
}
{ line[++lines] = $0 }
END {
    for (at = 1; at <= lines; at++) {
        for (h = 1; h <= hunks; h++)
            if (region[h] != "" ? trim(line[at]) == "/* >> " region[h] " */" : fits(h, at)) break
        if (h > hunks) { print line[at]; continue }
        match(line[at], /^ */)
        for (i = 1; i <= news[h]; i++) printf "%*s%s\n", RLENGTH, "", new[h, i]
        if (region[h] != "") while (line[at] !~ /^ *\/\* << /) at++
        else at += olds[h] - 1
        used[h]++
    }
    for (h = 1; h <= hunks; h++)
        if (used[h] != 1) print "#error change " h " of mistake " number " fits " used[h] + 0 " places"
    if (hunks == 0) print "#error no mistake " number
}
