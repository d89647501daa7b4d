#!/usr/bin/env bash
# Step 2: keys and values of every passage. RETRIEVAL is the file of step 1; DATA, MODEL, TOP_K, DEVICE_SIZE,
# SAVE_CACHE_DIR, LOAD_CACHE_DIR, LIMIT, OUT, DEVICE may be set; flags are passed on.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
option --retrieval "${RETRIEVAL:-}"
option --data "${DATA:-}"
option --model "${MODEL:-}"
option --top-k "${TOP_K:-}"
option --device-size "${DEVICE_SIZE:-}"
option --save-cache-dir "${SAVE_CACHE_DIR:-}"
option --load-cache-dir "${LOAD_CACHE_DIR:-}"
option --limit "${LIMIT:-}"
option --out "${OUT:-}"
option --device "${DEVICE:-}"
exec "${kvfoundry[@]}" rag build "${options[@]}" "$@"
