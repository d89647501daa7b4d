#!/usr/bin/env bash
# Step 3: answers, while passages come and go. RETRIEVAL and KV are the files of steps 1 and 2; DATA, MODEL, POLICY,
# DEVICE_SIZE, TRANSFER_DELAY, SPECULATE, LOAD_CACHE_DIR, LIMIT, OUT, DEVICE may be set; flags are passed on.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
option --retrieval "${RETRIEVAL:-}"
option --kv "${KV:-}"
option --data "${DATA:-}"
option --model "${MODEL:-}"
option --policy "${POLICY:-}"
option --device-size "${DEVICE_SIZE:-}"
option --transfer-delay "${TRANSFER_DELAY:-}"
option --speculate "${SPECULATE:-}"
option --load-cache-dir "${LOAD_CACHE_DIR:-}"
option --limit "${LIMIT:-}"
option --out "${OUT:-}"
option --device "${DEVICE:-}"
exec "${kvfoundry[@]}" rag decode "${options[@]}" "$@"
