#!/bin/sh
# Makes the environments that benchmarks/moe_layer.py, train_step.py, decode.py, generate.py and quality_peers.py compare
# us with; no part of the package.
#
#     benchmarks/install_peers.sh PEERS             # PyTorch, Hugging Face, Tutel, CTranslate2, llama.cpp
#     benchmarks/install_peers.sh --lingvo PEERS    # Lingvo, which needs an environment of its own
#     benchmarks/install_peers.sh --joeynmt PEERS   # JoeyNMT, for quality_peers.py
#
# PyTorch's wheels for CPUs alone suffice; where pip is to take them from elsewhere, PIP_EXTRA_INDEX_URL says so.
# TUTEL says where Tutel is taken from, if not from GitHub: a checkout, an archive of one, or git+file://...@ac0e51b.
set -eu

kind=
case "${1:-}" in
--lingvo | --joeynmt)
    kind=$1
    shift
    ;;
esac
if [ $# -ne 1 ]; then
    echo "usage: $0 [--lingvo | --joeynmt] DIRECTORY" >&2
    exit 2
fi

python3.11 -m venv "$1"
pip="$1/bin/pip"
if [ "$kind" = --lingvo ]; then
    # Without what it only needs for other models: Beam, notebooks, data sets.
    "$pip" install tensorflow==2.21.0 tensorflow-probability tf_keras matplotlib sentencepiece sympy \
        graph-compression-google-research model-pruning-google-research
    exec "$pip" install --no-deps lingvo==0.14.2
fi
if [ "$kind" = --joeynmt ]; then
    # Without its linters, data sets and image formats, and without its old protobuf, which training does not need.
    "$pip" install torch==2.13.0 numpy tensorboard sacrebleu sentencepiece subword-nmt pyyaml packaging matplotlib \
        pandas plotly importlib_metadata tqdm setuptools
    exec "$pip" install --no-deps joeynmt==2.3.0
fi
"$pip" install setuptools wheel numpy torch==2.13.0 transformers==5.23.0 \
    ctranslate2==4.8.5 llama-cpp-python==0.3.36 gguf==0.19.0 accelerate
# Tutel builds against the torch that is there.
NO_CUDA=1 exec "$pip" install --no-build-isolation \
    "${TUTEL:-git+https://github.com/microsoft/tutel@ac0e51b}"
