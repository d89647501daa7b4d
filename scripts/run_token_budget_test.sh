#!/usr/bin/env bash
# The token budget: what fits on a device. MODEL, GPU, CONTEXT, BATCH, CHUNK_TOKENS may be set; flags are passed on.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
option --model "${MODEL:-}"
option --gpu "${GPU:-}"
option --context "${CONTEXT:-}"
option --batch "${BATCH:-}"
option --chunk-tokens "${CHUNK_TOKENS:-}"
exec "${kvfoundry[@]}" plan "${options[@]}" "$@"
