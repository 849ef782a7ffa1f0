# Sourced: ends with 77 and a reason where $1 was not built or cannot run.
[ -s build/nvcc.found ] || { echo "SKIP: nvcc was not found when this was built"; exit 77; }
nvidia-smi -L 2>/dev/null | grep -q '^GPU' || { echo "SKIP: no GPU here (nvidia-smi -L names none)"; exit 77; }
