#!/usr/bin/env bash
# Step 1: passages for every question. DATA, K, MODE, RETRIEVER, ENCODER, LIMIT, OUT, DEVICE may be set; flags are passed on.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
option --data "${DATA:-}"
option --k "${K:-}"
option --mode "${MODE:-}"
option --retriever "${RETRIEVER:-}"
option --encoder "${ENCODER:-}"
option --limit "${LIMIT:-}"
option --out "${OUT:-}"
option --device "${DEVICE:-}"
exec "${kvfoundry[@]}" rag retrieve "${options[@]}" "$@"
