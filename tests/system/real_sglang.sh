#!/bin/sh
# The engines' suite (tests/integration/test_engines.py) against a real SGLang, on a machine with an NVIDIA card that nobody else uses.
#
#   tests/system/real_sglang.sh MODEL [VERSION]
#
# MODEL is a folder as Hugging Face lays it out, with a chat template; a small one will do. SGLang of that VERSION [0.5.23] comes into
# .cache/sglang, 16 GiB, once. MORE='"budget.mem_fraction=0.7", "engine.kv_dtype=fp8_e5m2"' are further settings of the appliance.

set -eu

fail() {
  echo "real_sglang.sh: $1" >&2
  exit "${2:-1}"
}

if [ $# -lt 1 ] || [ $# -gt 2 ]; then
  fail "usage: tests/system/real_sglang.sh MODEL [VERSION]" 2
fi
version=${2:-0.5.23}
[ -f "$1/config.json" ] || fail "there is no $1/config.json: name the folder of a model"
cards=$(nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>&1) ||
  fail "SGLang needs an NVIDIA card with its driver, and nvidia-smi tells of none: ${cards:-nothing}"
echo "cards: $cards"

model=$(cd "$1" && pwd)
cd "$(dirname "$0")/../.."
make venv
.venv/bin/appliancectl --state-dir .cache/sglang runtime install --use "sglang==$version"
# Kernels that are compiled as they are first needed take longer than a hang of the doubles may.
exec make test-real ENGINE=sglang ENGINE_PYTHON="$PWD/.cache/sglang/runtimes/current-sglang/bin/python" MODEL="$model" \
  SET="[\"supervisor.hang_floor_s=20\", \"supervisor.hang_ceiling_s=60\"${MORE:+, $MORE}]"
