#!/usr/bin/env bash
# Usage: build.sh VENV OUT
# Builds OUT/libcard.so for the torch of a virtual environment: what the sources define, and a stub that says "success"
# for every other name of CUDA's that this torch asks for, and for other_names.txt, which torch looks up while it runs.
set -euo pipefail

[ $# -eq 2 ] || { sed -n '2,4s/^# //p' "$0" >&2; exit 2; }
sources=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
packages=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$2"
out=$(cd "$2" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

headers=$(echo "$packages"/nvidia/cu1*/include)
[ -f "$headers/cuda_runtime_api.h" ] || { echo "no CUDA headers: install torch's CUDA build and nvidia-cuda-crt" >&2; exit 1; }
flags=(-O2 -fPIC -std=gnu11 -Wall -Wno-unused-parameter -I"$headers" -I"$packages/nvidia/cudnn/include")
for source in "$sources"/*.c; do
    gcc "${flags[@]}" -c "$source" -o "$work/$(basename "$source" .c).o"
done
nm --defined-only "$work"/*.o | awk '$2 == "T" {print $3}' | sort -u > "$work/defined.txt"

# cuDNN's descriptors need no card: these names stay the real library's.
real='^cudnn(Backend|Create|Destroy|Set(Activation|CTC|Conv|Filter|Pooling|RNN|Spatial|Tensor)|GetVersion|GetError|GetLastError|GetProperty|GetCudart|GetFilterNd|GetTensorNd)'
cuda='^(__cuda|cuda|cublas|cudnn|cusparse|cusolver|cufft|curand|nccl|cuFile|cu[A-Z]|nvshmem)'
for library in torch_cuda c10_cuda torch_python torch_cuda_linalg torch_nvshmem caffe2_nvrtc; do
    file=$packages/torch/lib/lib$library.so
    if [ -f "$file" ]; then nm -D --undefined-only "$file"; fi
done | awk '{print $2}' | sed 's/@.*//' | grep -E "$cuda" | grep -vE "$real" \
    | cat - "$sources/other_names.txt" | sort -u | comm -23 - "$work/defined.txt" > "$work/stubbed.txt"
{
    echo 'static int succeed(void) { return 0; }'
    while read -r name; do
        echo "int $name(void) __attribute__((alias(\"succeed\"), visibility(\"default\")));"
    done < "$work/stubbed.txt"
} > "$work/stubs.c"
gcc -O2 -fPIC -w -c "$work/stubs.c" -o "$work/stubs.o" # -w: built-in functions get other types

ln -sf libcard.so "$out/libcuda.so.1"
ln -sf libcard.so "$out/libnvidia-ml.so.1"
gcc -shared -o "$out/libcard.so" "$work"/*.o -lpthread -ldl
echo "$(wc -l < "$work/defined.txt") names defined, $(wc -l < "$work/stubbed.txt") stubbed: $out/libcard.so"
