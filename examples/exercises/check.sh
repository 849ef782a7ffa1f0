#!/bin/sh
# check.sh NUMBER [FILE] [--seed N] [--json FILE] [--case NAME] [--draw FILE]: builds and checks FILE as exercise
# NUMBER; default: mine.c in the exercise's folder, which begins as a copy of starter.c. Links the objects that ninja
# has compiled, or compiles the library, which takes half a minute for exercises with ranks. CC and CFLAGS may be set.
# check.sh exercises: checks all solutions, a line each.
here=$(dirname "$0") build=$(dirname "$0")/../../build
if [ "$1" = exercises ]; then
    code=0
    for folder in "$here"/[0-9]*/; do
        name=$(basename "$folder")
        text=$(sh "$0" "${name%%_*}" "${folder}"solution.c*) || code=1
        printf '%-24s %s\n' "$name" "$(echo "$text" | tail -n 1)"
    done
    exit $code
fi
number=${1#ex}
folder=$(echo "$here/$number"_*)
if [ ! -d "$folder" ]; then
    echo "there is no exercise \"$number\"; the exercises are:" $(cd "$here" && echo [0-9]*/) >&2
    exit 2
fi
shift
c=c
[ ! -e "$folder/starter.cu" ] || c=cu # CUDA: compiled as C++, for an emulation on the CPU
file=$folder/mine.$c
case $1 in
'' | --*)
    if [ ! -e "$file" ]; then
        cp "$folder/starter.$c" "$file" || exit 2
        echo "$file is a new copy of starter.$c: write your code there"
    fi ;;
*) file=$1; shift ;;
esac
mkdir -p "$build/exercises"
program=$build/exercises/$(basename "$folder")_$(basename "${file%.*}")
flags="-O1 -g -Wall -Wextra -Wno-unused-parameter $CFLAGS" objects= compiler=${CC:-cc}
[ $c = c ] || compiler="${CXX:-c++} -std=c++17 -x c++"
if [ $c = cu ] && [ -e "$build/emulator.o" ]; then # the emulation is optimized there, and kernels compile fast
    flags="-O0 -Wall -Wextra -Wno-unused-parameter -DCUDA_ON_CPU_LINKED $CFLAGS"
    objects="-x none $build/emulator.o"
fi
if grep -q "ranks\.h\|hpml\.h" "$folder/check.h" && [ -e "$build/hpml.o" ] && [ -e "$build/comm.o" ]; then
    flags="$flags -DHPMLI_BODY_INCLUDED -DHPML_COMM_BODY"
    objects="$build/hpml.o $build/comm.o $(cat "$build/zlib.flags")"
fi
$compiler $flags -I"$folder" "$file" -o "$program" $objects -lm -lpthread -ldl || exit
"$program" "$@"
