#!/bin/sh
# kernel_table.sh FOLDER: compiles hpml_cuda.cuh's body with -O2 for one kind of GPU (CUDA_ARCH, sm_90) and writes a row
# for each kernel to FOLDER/kernels.txt, from `-Xptxas -v` and, where cuobjdump is, from the machine code. Prints the
# rows that break a rule, and exits with 1 if there is one:
#   registers   those of a block's threads fit in the 65,536 of a multiprocessor
#   spills      at most 100 bytes
#   tensor      kernels that multiply halves or tf32 have tensor-core instructions
#   local       no access to local memory within a loop
found=$(cat build/nvcc.found)
[ -n "$found" ] || { echo "SKIP: nvcc was not found"; exit 77; }
arch=${CUDA_ARCH:-sm_90} folder=$1
nvcc=${found%% *} options= fast= has_code=
for word in $found; do
    case $word in -D* | -isystem=* | -ccbin=*) options="$options $word" ;; esac
done
"$nvcc" --help | grep -q -- '--split-compile' && fast='--split-compile 0'
mkdir -p "$folder" && rm -f "$folder"/cuda_body*
"$nvcc" -std=c++17 -arch="$arch" -O2 $fast $options -Xptxas -v --keep --keep-dir "$folder" -c tests/cuda_body.cu \
    -o "$folder/body.o" >"$folder/ptxas.log" 2>&1 || { tail -n 5 "$folder/ptxas.log"; exit 1; }
times >"$folder/times" # line 2: of the commands that have ended
sh "${0%/*}/sass.sh" "$folder/body.o" >"$folder/sass.txt" 2>&1 && has_code=1
awk -v has_code="$has_code" '
    function hex(s,    i, n) {
        for (i = 1; i <= length(s); i++) n = 16 * n + index("0123456789abcdef", substr(s, i, 1)) - 1
        return n + 0
    }
    # Counts the accesses to local memory between the target of a jump backward and the jump.
    function code_ends(    i, j) {
        for (i = 1; i <= accesses; i++)
            for (j = 1; j <= jumps; j++)
                if (access[i] >= target[j] && access[i] <= jump[j]) {
                    loops[code]++
                    break
                }
        tensor[code] = products
        accesses = jumps = products = 0
    }
    FILENAME ~ /\.ptx$/ {
        if ($0 ~ /\.entry/ && match($0, /_Z[A-Za-z0-9_]*/)) name = substr($0, RSTART, RLENGTH)
        if ($1 == ".maxntid") threads[name] = $2 + 0
        next
    }
    FILENAME ~ /ptxas\.log$/ {
        split($0, word, "\047")
        if ($0 ~ /Compiling entry function/) name = word[2]
        if ($0 ~ /Compiling entry function/ && !(name in registers)) list[++count] = name
        for (i = 2; i < NF; i++) {
            if ($0 ~ /bytes spill/ && $(i + 1) == "bytes" && $(i + 2) == "spill") spills[name] += $i
            if ($i == "Used") registers[name] = $(i + 1)
        }
        next
    }
    /Function :/ {
        if (code != "") code_ends()
        code = $NF
    }
    match($0, /\/\*[0-9a-f]+\*\//) {
        at = hex(substr($0, RSTART + 2, RLENGTH - 4))
        if ($0 ~ / H(G|)MMA/) products++
        if ($0 ~ / (LDL|STL)[. ]/) access[++accesses] = at
        if ($0 ~ / BRA[. ]/ && match($0, /0x[0-9a-f]+/)) {
            to = hex(substr($0, RSTART + 2, RLENGTH - 2))
            if (to < at) {
                jump[++jumps] = at
                target[jumps] = to
            }
        }
    }
    END {
        if (code != "") code_ends()
        for (i = 1; i <= count; i++) {
            n = list[i]
            t = n in threads ? threads[n] : 256
            print registers[n], t, spills[n] + 0, has_code ? tensor[n] + 0 : "-", has_code ? loops[n] + 0 : "-", n
        }
    }' "$folder"/cuda_body*.ptx "$folder/ptxas.log" "$folder/sass.txt" | c++filt | sort -k 6 >"$folder/rows"
{
    awk -F '[ms ]+' 'NR == 2 { print "compiled in", int(60 * ($1 + $3) + $2 + $4), "s of processor time" }' \
        "$folder/times"
    echo "$arch: registers of a thread, threads of a block, bytes of spills, tensor-core instructions, accesses to"
    echo "local memory in loops, kernel"
    cat "$folder/rows"
} >"$folder/kernels.txt"
[ -s "$folder/rows" ] || { echo "no kernel in $folder/ptxas.log"; exit 1; }
awk '
    function breaks(rule) { print rule ": " $0; bad = 1 }
    {
        halves = /k_product_dense/ || /k_product_gather<[0-9]+, [12]>/ || /k_attn(_back)?<[12],/
        if (int(($1 + 7) / 8) * 8 * int(($2 + 31) / 32) * 32 > 65536) breaks("registers")
        if ($3 > 100) breaks("spills")
        if (halves && $4 == 0 && $4 != "-") breaks("tensor")
        if ($5 > 0 && $5 != "-") breaks("local")
    }
    END { exit bad }' "$folder/rows"
