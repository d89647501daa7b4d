# What the scripts share: where the command is, and options that the environment may set.
# shellcheck shell=bash
set -euo pipefail

# KVFOUNDRY names the command; else the installed one, else that of the checkout's own environment.
if [ -n "${KVFOUNDRY:-}" ]; then
  read -r -a kvfoundry <<<"${KVFOUNDRY}"
elif command -v kvfoundry >/dev/null; then
  kvfoundry=(kvfoundry)
else
  kvfoundry=("$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin/kvfoundry")
fi

options=()
# option FLAG VALUE: pass the flag on when the value is not empty.
option() {
  if [ -n "${2}" ]; then options+=("${1}" "${2}"); fi
}
