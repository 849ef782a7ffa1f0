#!/bin/sh
# hpml_cuda.cuh under every compiler, without a warning: as a plain header, and its body, whole and in parts, for one
# kind of GPU, with HPML_TEST_ALL for three. Programs link, export only names hpml_*, and without a GPU report its
# absence. Device code is not optimized, because that takes minutes.
tmp=$(mktemp -d) passed=0 failed=0 skipped=0
trap 'rm -rf "$tmp"' EXIT
ok() { passed=$((passed + 1)); }
# skip N REASON: N checks are left out.
skip() { skipped=$((skipped + $1)); echo "skip $1 checks ($2)"; }
bad() { failed=$((failed + 1)); echo "FAIL $1"; head -n 5 "$tmp/err"; }
try() { if "$@" >"$tmp/err" 2>&1; then ok; else bad "$*"; fi; }
finish() { echo "$passed passed, $failed failed, $skipped skipped"; [ $failed -eq 0 ]; exit; }
strict='-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror'
cat >"$tmp/user.c" <<'C'
#include "hpml_cuda.cuh"
static size_t held;
static void *take(size_t size, size_t align, void *user)
{
    (void)align, (void)user, held += size;
    return aligned_alloc(64, (size + 63) / 64 * 64);
}
static void  give(void *p, size_t size, void *user) { (void)user, held -= size, free(p); }
int unit(void);
int main(void)
{
    hpml_cuda_info info;
    hpml_ctx_desc  desc = { .backend = hpml_backend_cuda(), .allocator = { take, give, NULL } };
    hpml_ctx      *c = hpml_ctx_create(&desc);
    int            devices = hpml_cuda_device_count();
    printf("%s\n", hpml_ctx_error(c));
    if (devices == 0 && hpml_ctx_status(c) != HPML_ERR_CUDA) return 1;
    if (devices == 0 && (hpml_cuda_stream(c) || hpml_input_2d(c, 1, 1))) return 1;
    if (devices > 0 && (hpml_ctx_status(c) != HPML_OK || !hpml_cuda_stream(c))) return 2;
    if (hpml_cuda_device_info(devices, &info) == HPML_OK) return 3;
    hpml_ctx_free(c);
    return held == 0 && unit() == hpml_version() ? 0 : 4;
}
C
sed -i '1i #include <stdio.h>\n#include <stdlib.h>' "$tmp/user.c"
printf '#include "hpml_cuda.cuh"\n' >"$tmp/only.c"
cp "$tmp/only.c" "$tmp/only.cc"
cat >"$tmp/unit.cu" <<'C'
#include "hpml_cuda.cuh"
extern "C" int unit(void) { hpml_cuda_desc d = {}; return d.device ? 0 : hpml_version(); }
C
printf '#define HPML_CUDA_IMPLEMENTATION\n#include "hpml_cuda.cuh"\n' >"$tmp/wrong.c"
cat >"$tmp/whole.cu" <<'C'
#define HPML_IMPLEMENTATION
#include "hpml_comm.h"
#include "hpml_cuda.cuh"
extern "C" int unit(void) { return hpml_version(); }
C
for cc in gcc clang; do
    command -v $cc >/dev/null || { skip 1 "no $cc"; continue; }
    try $cc -std=c99 -fsyntax-only $strict -Wstrict-prototypes -I. "$tmp/only.c"
done
for cxx in g++ clang++; do
    command -v $cxx >/dev/null || { skip 1 "no $cxx"; continue; }
    try $cxx -std=c++17 -fsyntax-only $strict -I. "$tmp/only.cc"
done
if ! gcc -fsyntax-only -I. "$tmp/wrong.c" 2>"$tmp/err" && grep -q 'its body is for nvcc' "$tmp/err"
then ok; else bad "the body under gcc is an error that says so"; fi
# probe.sh finds cuDNN and NCCL in Python's packages if CUDA has none, and reports that they are missing if no package
# has them.
for name in cudnn nccl cublas cu13; do
    mkdir -p "$tmp/bin" "$tmp/nvidia/$name/include" "$tmp/nvidia/$name/lib" "$tmp/nvidia_${name}_cu12-1.dist-info"
done
touch "$tmp/nvidia/cudnn/include/cudnn.h" "$tmp/nvidia/cudnn/lib/libcudnn.so.9" "$tmp/nvidia/nccl/include/nccl.h"
for name in cublas:12 cu13:13; do
    for file in include/cublasLt.h lib/libcublas.so.${name#*:} lib/libcublasLt.so.${name#*:}; do
        touch "$tmp/nvidia/${name%:*}/$file"
    done
done
printf '#!/bin/sh\necho "%s/$WHEELS"\n' "$tmp" >"$tmp/bin/python3"
printf '#!/bin/sh\nexec gcc -nostdinc "$@"\n' >"$tmp/bin/bare"
printf '#!/bin/sh\necho "Cuda compilation tools, release $RELEASE, V1"\n' >"$tmp/bin/nvcc"
chmod +x "$tmp"/bin/*
probe() {
    PATH="$tmp/bin:$PATH" CC=bare NVCC=nvcc NVCC_CCBIN=$4 CUDA_ARCH=sm_90 WHEELS=$1 RELEASE=$2 \
        sh tests/probe.sh "$tmp/nvcc.found"
    sed "s|$tmp/||g; s/ *$//" "$tmp/nvcc.found" >"$tmp/err"
    if [ "$(cat "$tmp/err")" = "bin/nvcc -arch=sm_90${4:+ -ccbin=$4} $3" ]
    then ok; else bad "the probe of packages in $1 for CUDA $2"; fi
}
one() { echo "-isystem=nvidia/$1/include -Lnvidia/$1/lib -Xlinker=-rpath,nvidia/$1/lib"; }
none='-DHPML_CUDA_NO_CUBLAS -DHPML_CUDA_NO_CUDNN'
nccl="$(one nccl) -DHPML_USE_NCCL"
probe nvidia 12.8 "$(one cublas) -l:libcublasLt.so.12 -l:libcublas.so.12 $(one cudnn) -l:libcudnn.so.9 $nccl"
probe nvidia 13.0 "$(one cu13) -l:libcublasLt.so.13 -l:libcublas.so.13 -DHPML_CUDA_NO_CUDNN"
probe nvidia 11.8 "$none"
probe nvidia 11.8 "$none" g++-12
rm "$tmp/nvidia/cudnn/lib/libcudnn.so.9" "$tmp/nvidia/cublas/lib/libcublas.so.12"
probe nvidia 12.8 "$none $nccl"
mv "$tmp/nvidia" "$tmp/two words"
probe 'two words' 13.0 "$none"
rm -r "$tmp/two words"
probe nvidia 13.0 "$none"
# gpu_contact.sh without a GPU and nvcc: what it skips, and what becomes of a stage that fails or is killed.
mkdir -p "$tmp/contact/build" "$tmp/without"
ln -s "$PWD/tests" "$tmp/contact/tests"
printf '#!/bin/sh\nexit 1\n' | tee "$tmp/without/nvidia-smi" >"$tmp/without/python3" # PyTorch takes seconds to load
printf '#!/bin/sh\necho "begins"; sleep "$SLEEP"; exit "$STATUS"\n' >"$tmp/contact/build/test_cuda"
chmod +x "$tmp/without/nvidia-smi" "$tmp/without/python3" "$tmp/contact/build/test_cuda"
contact() { # STATUS SLEEP LIMIT WANT TEXT
    (cd "$tmp/contact" && PATH="$tmp/without:$PATH" NVCC=none NINJA=none CC=true CXX=true STATUS=$1 SLEEP=$2 LIMIT=$3 \
        sh tests/gpu_contact.sh first out) >"$tmp/err" 2>&1
    code=$?
    tail -n 8 "$tmp/err" >"$tmp/table"
    if [ $code -eq "$4" ] && grep -q "smoke_emulated .* $5" "$tmp/table" &&
        grep -q 'tests .* SKIP: no GPU' "$tmp/table" && grep -q 'build .* SKIP: no nvcc' "$tmp/table" &&
        grep -q begins "$tmp/contact/out/smoke_emulated.log"
    then ok; else bad "gpu_contact.sh with a smoke test of exit $1 after $2 s"; fi
}
contact 0 0 100 0 ok
contact 3 0 100 1 'FAILED: exit 1'
contact 0 20 9 1 'FAILED: not done in'
# doctor.sh reports the reason when nvcc cannot compile.
doctor() {
    printf '#!/bin/sh\n[ "$1" = --version ] && exec echo "tools, release 12.4, V1"\necho "%s" >&2; exit 1\n' "$1" \
        >"$tmp/without/nvcc"
    chmod +x "$tmp/without/nvcc"
    CC=true NVCC="$tmp/without/nvcc" sh tests/doctor.sh >"$tmp/err" 2>&1
    if tr '\n' ' ' <"$tmp/err" | grep -q "$2"; then ok; else bad "doctor with an nvcc that says $1"; fi
}
doctor 'mathcalls.h(79): error: exception specification is incompatible with cospi' 'is too new for CUDA 12.4,'
doctor '#error -- unsupported GNU version! gcc versions later than 13 are not supported!' 'set NVCC_CCBIN'
doctor 'nvcc fatal: Cannot find compiler, error' 'Cannot find compiler'
# The examples, their devices emulated. 11's weights: a file as published, all of it 3.0039: the vocabulary's 50,257
# rows are equally likely.
mkdir -p "$tmp/toolkit"
echo "#include \"$PWD/tests/emulator/cuda_on_cpu.h\"" >"$tmp/toolkit/cuda_runtime.h"
example() { # NAME OPTIONS...
    name=$1; shift
    try ${CXX:-c++} -x c++ -std=c++17 -Wall -Wextra -Werror -DHPMLI_BODY_INCLUDED -DHPML_CUDA_BODY -DHPML_COMM_BODY \
        -DHPML_USE_NCCL "$@" examples/$name.cu -x none build/cuda_on_cpu.o build/nccl_on_cpu.o build/hpml.o \
        build/comm.o -o "$tmp/${name#*/}" -rdynamic -lm -lpthread -ldl $(sed 's/-D[^ ]*//' build/zlib.flags)
}
says() {
    text=$1 want=$2; shift 2
    "$@" >"$tmp/err" 2>&1
    code=$?
    if [ $code -eq "$want" ] && grep -q -- "$text" "$tmp/err"
    then ok; else bad "exit $code, not $want, or no '$text': $*"; fi
}
for name in 10_mnist_cuda 11_gpt2 12_nccl_data_parallel; do example $name; done
says 'samples_per_second' 0 "$tmp/10_mnist_cuda" --model mlp --samples 400 --epochs 1 --precision bf16 --json
if grep -q 'products: [1-9][0-9]* by cuBLASLt with .* replayed, 0 given up' "$tmp/err"
then ok; else bad '10_mnist_cuda says what ran where'; fi
says '--precision half: expected one of f32|tf32' 2 "$tmp/10_mnist_cuda" --precision half
for name in 10_mnist_cuda 11_gpt2 12_nccl_data_parallel; do
    says '^  --batch N ' 0 build/terminal 80 "$tmp/$name" --help
done
gpt2="$tmp/11_gpt2 --layers 1 --width 16 --heads 2 --context 8 --batch 1 --steps 2 --precision f32"
json= at=0
for a in wte.weight:50257,16 wpe.weight:8,16 h.0.ln_1.weight:16 h.0.ln_1.bias:16 h.0.attn.c_attn.weight:16,48 \
    h.0.attn.c_attn.bias:48 h.0.attn.c_proj.weight:16,16 h.0.attn.c_proj.bias:16 h.0.ln_2.weight:16 h.0.ln_2.bias:16 \
    h.0.mlp.c_fc.weight:16,64 h.0.mlp.c_fc.bias:64 h.0.mlp.c_proj.weight:64,16 h.0.mlp.c_proj.bias:16 \
    ln_f.weight:16 ln_f.bias:16; do
    end=$((at + 4 * $(echo "${a#*:}" | tr , '*')))
    json="$json,\"${a%:*}\":{\"dtype\":\"F32\",\"shape\":[${a#*:}],\"data_offsets\":[$at,$end]}" at=$end
done
json=$(printf '%-1500s' "{${json#,}}")
{
    printf "\\$(printf %o $((${#json} % 256)))\\$(printf %o $((${#json} / 256)))\\0\\0\\0\\0\\0\\0%s" "$json"
    head -c $at /dev/zero | tr '\0' @
} >"$tmp/weights"
says '"loss": [0-9.]*, .*"mfu"' 0 $gpt2 --json
says '; tuned [1-9]' 0 $gpt2
says '; algorithms 21, 0 by own' 0 $gpt2 --no-tune
says '^layer  *op  *fwd us' 0 $gpt2 --profile
says 'step 1  loss 10.8249' 0 $gpt2 --weights "$tmp/weights"
says '"wte.weight": the file has 50257x16, the model 50257x8' 1 $gpt2 --weights "$tmp/weights" --width 8
says 'cannot be read' 1 $gpt2 --tokens /nonexistent
says 'scores differ by [0-9.]*e-0[5-9] at most' 0 $gpt2 --prompt abc --check
says '^[0-9]* tokens; one takes' 0 $gpt2 --precision bf16 --steps 0 --prompt abc --check
says '^CPU, f32: ' 0 $gpt2 --cpu
says '--precision bf16: on the CPU f32 only' 2 $gpt2 --precision bf16 --cpu
example tour/9_own_gradients -I"$tmp/toolkit"
says "^2 GPUs: the mean of 50 steps has errors up to 0[.][01]" 0 env CUDA_ON_CPU_DEVICES=2 "$tmp/9_own_gradients"
# The ladder with all its rungs, its launches those of cuda_on_cpu.h.
mkdir -p "$tmp/ladder"
for name in cublas_v2 cuda cuda_bf16 cuda_runtime mma; do : >"$tmp/ladder/$name.h"; done
sed 's/^#ifndef HPML_CUDA_ON_CPU.*/#if 1/; s/RING_BYTES>>>(/RING_BYTES, 0, /; s/>>>(/, 0, 0, /
    s/\(k[a-z0-9_]*\(<[a-z]*>\)*\)<<</HPMLG_LAUNCH((\1), /' examples/ladder_matmul.cu >"$tmp/ladder/ladder.cu"
try ${CXX:-c++} -x c++ -std=c++17 -O1 -Wall -Wextra -Werror -fno-strict-aliasing -DHPML_CUDA_ON_CPU -I"$tmp/ladder" \
    -Iexamples -include tests/emulator/ladder_on_cpu.h "$tmp/ladder/ladder.cu" -o "$tmp/ladder/ladder"
says '^8  *cuBLAS bf16 ' 0 "$tmp/ladder/ladder" --size 128
says '^6  *Hopper .* [0-9.]*e[-+][0-9]*$' 0 "$tmp/ladder/ladder" --size 384 --rung 6
says 'Hopper  *skipped: wgmma is for Hopper alone' 0 env CUDA_ON_CPU_MAJOR=8 "$tmp/ladder/ladder" --size 128 --rung 6
[ -s build/nvcc.found ] || { skip 20 'no nvcc'; finish; }

found=$(cat build/nvcc.found) nvcc=${found%% *} libs= options=
for word in ${found#"$nvcc"} $(sed 's/-D[^ ]*//' build/zlib.flags); do
    case $word in -l* | -L* | -Xlinker=*) libs="$libs $word" ;; esac
    case $word in -D* | -isystem=* | -ccbin=*) options="$options $word" ;; esac
done
fast='-Xptxas -O1'
"$nvcc" --help | grep -q Ofast-compile && fast='-Ofc max'
archs= first=
for arch in 80 ${HPML_TEST_ALL:+90 100}; do
    "$nvcc" --list-gpu-code | grep -qx "sm_$arch" ||
        { skip 1 "nvcc cannot compile for sm_$arch"; continue; }
    archs="$archs -gencode arch=compute_$arch,code=sm_$arch" first=${first:-sm_$arch}
done
cu() { try "$nvcc" -std=c++17 -I. $options $fast -Werror all-warnings -Xcompiler -Wall,-Wextra,-Wshadow,-Werror "$@"; }
cu $archs --threads 3 -c tests/cuda_body.cu -o "$tmp/body.o"
[ -z "$HPML_TEST_ALL" ] ||
    cu -arch=$first -DHPML_CUDA_NO_CUBLAS -DHPML_CUDA_NO_CUDNN -c "$tmp/whole.cu" -o "$tmp/whole.o"
cu -arch=$first -c "$tmp/unit.cu" -o "$tmp/unit.o"
extra=$(nm -g --defined-only "$tmp/body.o" 2>/dev/null | awk '$2 ~ /[TDBR]/ { print $3 }' |
    grep -vE '^(hpml|own_kernel)_') # own_kernel_: of tests/own_kernel.h
if [ -z "$extra" ]; then ok; else echo "$extra" >"$tmp/err"; bad "visible names that are not hpml_*"; fi

try gcc -std=c11 -Wall -Wextra -Wshadow -Werror -I. -c "$tmp/user.c" -o "$tmp/user.o"
cuda=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
try "$nvcc" "$tmp/user.o" "$tmp/unit.o" "$tmp/body.o" build/hpml.o -o "$tmp/by_nvcc" $libs
try gcc "$tmp/user.o" "$tmp/unit.o" "$tmp/body.o" build/hpml.o -o "$tmp/by_gcc" -L"$cuda/lib64" \
    -Wl,-rpath,"$cuda/lib64" $(echo "$libs" | sed 's/-Xlinker=/-Wl,/g') -lcudart -lstdc++ -lm -lpthread
[ -z "$HPML_TEST_ALL" ] || try "$nvcc" "$tmp/user.o" "$tmp/whole.o" -o "$tmp/bare" -Xcompiler -pthread
for program in by_nvcc by_gcc bare; do
    [ -x "$tmp/$program" ] || continue
    "$tmp/$program" >"$tmp/err" 2>&1
    code=$?
    if [ $code -eq 0 ] && { nvidia-smi -L >/dev/null 2>&1 || grep -q 'no usable device' "$tmp/err"; }; then ok
    else bad "$program: exit $code"; fi
done

# The header's and the README's examples, with the bodies from above: the compiler takes less than 10 s of processor
# time for each.
seconds() { # of processor time, by the commands that have ended
    times >"$tmp/times"
    awk -F '[ms ]+' 'NR == 2 { print int(60 * ($1 + $3) + $2 + $4) }' "$tmp/times"
}
sed -n '/^\/\/ QUICK EXAMPLE/,/DOES NOT/p' hpml_cuda.cuh | grep '^//     ' | sed 's|^//     ||' >"$tmp/example0.cu"
awk '/^```cuda$/ { on = 1; n++; next } /^```$/ { on = 0 } on { print > ("'"$tmp"'/example" n ".cu") }' README.md
for f in "$tmp"/example*.cu; do
    seconds >"$tmp/before"
    cu -arch=$first -DHPMLI_BODY_INCLUDED -DHPML_CUDA_BODY -include stdio.h "$f" "$tmp/body.o" build/hpml.o \
        -o "${f%.cu}" $libs -Xcompiler -pthread
    seconds >"$tmp/after"
    if [ $(($(cat "$tmp/after") - $(cat "$tmp/before"))) -lt 10 ]
    then ok; else bad "$(basename "$f") takes 10 s or more to compile"; fi
    [ -x "${f%.cu}" ] || continue
    "${f%.cu}" >"$tmp/err" 2>&1
    if nvidia-smi -L >/dev/null 2>&1 || grep -q 'no usable device' "$tmp/err"
    then ok; else bad "$(basename "$f") says nothing about the GPU"; fi
done
# The ladder: whether ptxas compiles its rung for Hopper without spills and without making its products wait for each
# other, and whether the machine code has them and TMA's copies.
if echo "$found" | grep -q HPML_CUDA_NO_CUBLAS || ! "$nvcc" --help | grep -q sm_90a
then skip 2 'no cuBLAS, or nvcc cannot compile for sm_90a'
else
    "$nvcc" -std=c++17 -O3 $options $archs -gencode arch=compute_90a,code=sm_90a -Xptxas -v -Werror all-warnings \
        -Xcompiler -Wall,-Wextra,-Wshadow,-Werror -c examples/ladder_matmul.cu -o "$tmp/ladder.o" >"$tmp/log" 2>&1
    code=$?
    grep -E 'C75[0-9][0-9]|error|warning|setmaxnreg' "$tmp/log" >"$tmp/err"
    grep -A 2 "k6_hopper.* 'sm_90a'" "$tmp/log" | grep -q ' 0 bytes stack frame, 0 bytes spill stores' ||
        echo 'registers are spilled' >>"$tmp/err"
    if [ $code -eq 0 ] && [ ! -s "$tmp/err" ]; then ok; else bad "the ladder's rung for Hopper, by ptxas"; fi
    sh tests/sass.sh "$tmp/ladder.o" >"$tmp/sass" 2>"$tmp/err"
    if [ $? -eq 77 ]; then skip 1 'no cuobjdump'
    else
        for word in 'HGMMA.64x256x16.F32.BF16 .*tnspB' 'DEPBAR.LE gsb0, 0x1' UTMALDG.2D SYNCS.PHASECHK USETMAXREG; do
            grep -q "$word" "$tmp/sass" || echo "no $word" >>"$tmp/err"
        done
        if [ ! -s "$tmp/err" ]; then ok; else bad "the ladder's machine code for Hopper"; fi
    fi
fi
# What the kernels' machine code may take: a kernel that breaks a rule is named; with HPML_TEST_ALL, because compiling
# them takes a minute, those of hpml_cuda.cuh break none (build/log/kernels/kernels.txt).
mkdir -p "$tmp/kernel-table/build" "$tmp/kernel-table/tests"
cp build/nvcc.found "$tmp/kernel-table/build"
cat >"$tmp/kernel-table/tests/cuda_body.cu" <<'CU'
static __global__ void __launch_bounds__(1024, 2) many_values(float *x)
{
    float a[80];
    for (int i = 0; i < 80; i++) a[i] = x[i * 999];
    __syncthreads();
    for (int i = 0; i < 80; i++) x[i * 77 + threadIdx.x] = a[i] * a[79 - i];
}
void run(float *x) { many_values<<<1, 128>>>(x); }
CU
(cd "$tmp/kernel-table" && sh "$OLDPWD/tests/kernel_table.sh" table) >"$tmp/err" 2>&1
code=$?
if [ $code -eq 1 ] && grep -q '^spills: 32 1024 [1-9][0-9][0-9] .* many_values' "$tmp/err"
then ok; else bad 'the table of kernels names one that spills'; fi
if [ -n "$HPML_TEST_ALL" ]; then
    if sh tests/kernel_table.sh build/log/kernels >"$tmp/err" 2>&1; then ok; else bad 'the table of kernels'; fi
fi
finish
