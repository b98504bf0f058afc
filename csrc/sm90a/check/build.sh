#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Contributors to mla-kernels
# Builds the library that check.py loads: build.sh CUTLASS_INCLUDE OUT.so [nvcc options]
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
include=$1
out=$2
shift 2
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
for f in decode_n16 decode_n32 decode_n64 decode16_bf16 decode16_fp16 combine launch check/capi; do
  nvcc -std=c++20 -O3 -gencode=arch=compute_90a,code=sm_90a -Xcompiler -fPIC -lineinfo -Xptxas -v "$@" \
    -I"$here" -I"$here/../include" -I"$include" -c "$here/$f.cu" -o "$tmp/$(basename $f).o" 2>"$tmp/log" || { cat "$tmp/log"; exit 1; }
  grep -E "Compiling|spill|Used|warning|C75" "$tmp/log" || true
done
nvcc -shared -cudart static -o "$out" "$tmp"/*.o
