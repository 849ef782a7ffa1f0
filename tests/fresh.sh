#!/bin/sh
# fresh.sh SUITE [COMMAND...]: the README's two commands on a machine that has nothing: as root, with a network. SUITE:
# bookworm, trixie (Debian), noble (Ubuntu 24.04) ... debootstrap installs its smallest system in a folder, this
# checkout is copied there, and each line of both commands is printed with the seconds since the command's start.
# Between the two: what the demo has drawn, and whether the README's first program compiles and runs. COMMAND: runs in
# place of the second command, which takes about ten minutes.
suite=$1
[ -n "$suite" ] || { sed -n '2,3p' "$0"; exit 2; }
shift
[ "$(id -u)" = 0 ] || { echo "fresh.sh: run it as root, because it makes a chroot"; exit 1; }
command -v debootstrap >/dev/null || { echo "fresh.sh: install debootstrap"; exit 1; }
root=${FRESH:-/var/tmp/hpml-fresh}/$suite
mirror= components=main script=
case $suite in
jammy | noble) mirror=${UBUNTU_MIRROR:-http://archive.ubuntu.com/ubuntu} components=main,universe ;;
esac
if [ ! -e "$root/etc/os-release" ]; then
    mkdir -p "$root"
    [ -e "/usr/share/debootstrap/scripts/$suite" ] || script=gutsy # that for all of Ubuntu, if debootstrap is older
    debootstrap --variant=minbase --components=$components "$suite" "$root" $mirror $script >"$root.log" 2>&1 ||
        { tail -n 5 "$root.log"; exit 1; }
    [ ! -e /etc/apt/apt.conf.d ] || cp -n /etc/apt/apt.conf.d/* "$root/etc/apt/apt.conf.d/" 2>/dev/null
fi
for dir in proc sys dev; do mountpoint -q "$root/$dir" || mount --rbind /$dir "$root/$dir"; done
trap 'umount -l "$root/proc" "$root/sys" "$root/dev" 2>/dev/null' EXIT
cp /etc/resolv.conf "$root/etc/" 2>/dev/null
rm -rf "$root/hpml"
git clone -q . "$root/hpml" || exit 1
timed() { # COMMAND: prints its lines with the seconds since its start
    began=$(date +%s)
    chroot "$root" sh -c "cd /hpml && $1" 2>&1 | while IFS= read -r line; do
        printf '%5d s  %s\n' $(($(date +%s) - began)) "$line"
    done
    echo "took $(($(date +%s) - began)) s: $1"
}
timed 'sh tests/install.sh && ninja demo'
echo "drawn: $(cd "$root/hpml/build" && ls loss.svg trace.json 2>&1 | tr '\n' ' ')"
timed 'awk "/^\`\`\`c\$/ { on = 1; next } /^\`\`\`\$/ { if (on) exit } on" README.md >xor.c &&
    cc -O2 -I. xor.c -o xor -lm -lpthread && ./xor'
timed "${*:-ninja test}"
