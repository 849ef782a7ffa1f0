#!/bin/sh
# docs.sh PAGE: writes one HTML page of the API, made from the headers: their first lines, glossaries and sections
# api-*, each declaration with its comment; every public name is a link to where it is declared. Needs awk alone.
page=${1:?usage: sh tests/docs.sh PAGE}
{
    cat <<'END'
<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>hpml</title><style>
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 62rem; padding: 1rem; color: #1a1a1a }
pre { font: 13px/1.45 ui-monospace, monospace; background: #f6f6f4; padding: .6rem .8rem; overflow-x: auto }
p.c { white-space: pre-wrap; font: 14px/1.5 ui-monospace, monospace; margin: 1rem 0 .3rem }
a { color: #0b57a4; text-decoration: none } a:hover { text-decoration: underline }
nav { columns: 3; font-size: 14px } h2 { border-bottom: 1px solid #ccc; margin-top: 2.5rem }
:target { background: #fff3bf }
@media (prefers-color-scheme: dark) { body { background: #161616; color: #ddd } pre { background: #222 }
a { color: #7db8ff } :target { background: #554400 } }
@media (max-width: 45rem) { nav { columns: 1 } }</style></head><body><h1>hpml</h1>
<p>The public interface of the three headers, as their comments describe it.</p>
END
    awk '
        function escape(s) { gsub(/&/, "\\&amp;", s); gsub(/</, "\\&lt;", s); gsub(/>/, "\\&gt;", s); return s }
        # Puts links into a text, and at the first place that declares a name its anchor.
        function link(s, declares,    out, name, before) {
            out = ""
            while (match(s, /(hpml|HPML)_[A-Za-z0-9_]+/)) {
                name = substr(s, RSTART, RLENGTH)
                before = substr(s, 1, RSTART - 1)
                if (!(name in home)) out = out before name
                else if (declares && home[name] == FNR FILENAME) out = out before "<b id=\"" name "\">" name "</b>"
                else out = out before "<a href=\"#" name "\">" name "</a>"
                s = substr(s, RSTART + RLENGTH)
            }
            return out s
        }
        function flush() { if (code != "") print "<pre>" code "</pre>"; code = "" }
        FNR == 1 { pass = ++seen[FILENAME]; api = ended = 0 }
        pass == 1 { # where each public name is declared: the last name before ( of a function, a typedef, a macro
            if (/stop here if you only want the API/) ended = 1
            if (ended && !(FILENAME in done)) done[FILENAME] = FNR
            if (ended) next
            line = $0
            sub(/\/\*.*/, "", line)
            name = ""
            if (line ~ /^HPML_API/ && match(line, /hpml_[a-z0-9_]+\(/)) name = substr(line, RSTART, RLENGTH - 1)
            else if (line ~ /^} *hpml_[a-z0-9_]+;/ || line ~ /^typedef .*hpml_[a-z0-9_]+;/) {
                match(line, /hpml_[a-z0-9_]+;/)
                name = substr(line, RSTART, RLENGTH - 1)
            } else if (line ~ /^#define HPML_/) { split(line, word, /[ (]+/); name = word[2] }
            if (line ~ /^\/\/ >>api-/) sections[++section_count] = line
            if (name != "" && !(name in home)) home[name] = FNR FILENAME
            next
        }
        FNR == 1 && !listed++ {
            print "<nav>"
            for (i = 1; i <= section_count; i++) {
                tag = sections[i]
                sub(/^\/\/ >>/, "", tag)
                title = tag
                sub(/ .*/, "", tag)
                sub(/^[^ ]+ */, "", title)
                print "<a href=\"#" tag "\">" escape(title) "</a><br>"
            }
            print "</nav>"
        }
        FNR == 1 { print "<h1>" escape(FILENAME) "</h1>" }
        FNR >= done[FILENAME] { flush(); nextfile }
        /^\/\/ >>api-/ {
            flush()
            tag = $2
            sub(/^>>/, "", tag)
            title = $0
            sub(/^\/\/ >>[^ ]+ */, "", title)
            print "<h2 id=\"" tag "\">" escape(title) "</h2>"
            api = 1
            next
        }
        /^\/\/ >>/ { flush(); api = 0 }
        /^\/\/ [-=]+$/ || /^\/\/ PART/ || !api { next }
        /^\/\*/ || comment {
            flush()
            text = text (comment ? "\n" : "") $0
            comment = !/\*\//
            if (comment) next
            after = text
            sub(/\*\/.*/, "", text)
            sub(/^\/\* */, "", text)
            gsub(/\n   /, "\n", text)
            print "<p class=\"c\">" link(escape(text), 0) "</p>"
            text = ""
            next
        }
        /^#(ifdef|ifndef|endif|else|if|undef|include)/ || /extern "C"/ || /^HPML[A-Z]*_REF/ { next }
        /^$/ { flush(); next }
        { code = code (code == "" ? "" : "\n") link(escape($0), 1) }
        END { flush() }' hpml.h hpml_comm.h hpml_cuda.cuh hpml.h hpml_comm.h hpml_cuda.cuh
    echo '</body></html>'
} >"$page.new" || exit 1
mv "$page.new" "$page"
echo "$page: $(grep -c '<b id=' "$page") lines with declarations, $(grep -o '<h2' "$page" | wc -l) sections"
