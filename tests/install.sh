#!/bin/sh
# install.sh [PACKAGE...]: installs what the demo and the tests need on Debian and Ubuntu: a C compiler, ninja, MPI,
# zlib. Packages that are named, as clang, are installed too if there are such. Ubuntu 24.04 gets Open MPI, because each
# rank that its MPICH package starts is alone.
sudo=env
if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || { echo "install.sh: run it as root, because there is no sudo here"; exit 1; }
    sudo="sudo env"
fi
command -v apt-get >/dev/null || {
    echo "install.sh: there is no apt-get here; install a C compiler, ninja, MPICH and zlib by hand"
    exit 1
}
mpi=mpich
! grep -q '^VERSION_ID="24.04"' /etc/os-release || mpi='libopenmpi-dev openmpi-bin'
export DEBIAN_FRONTEND=noninteractive
get() { $sudo DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >/dev/null; }
echo "installing build-essential ninja-build $mpi zlib1g-dev (about 600 MB on a bare system, most of it MPI's)"
$sudo apt-get update -qq >/dev/null || exit 1
get build-essential ninja-build $mpi zlib1g-dev || exit 1
for package; do
    get "$package" 2>/dev/null || echo "not installed: $package (its tests will be skipped)"
done
