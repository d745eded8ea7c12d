#!/bin/sh
# One 48 GB card: Qwen3 32B in 4 bit, four texts of 16k tokens at once. Name a drafter for it (DRAFTER=…): a published
# one, or what `eagle31 train` made.
set -e  # the plan has a row more than texts are served at once: prompts are read in one of their own
TARGET=${TARGET:-Qwen/Qwen3-32B}
: "${DRAFTER:?set DRAFTER to a folder or Hub id of a drafter for $TARGET}"
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
eagle31 plan "$TARGET" --drafter "$DRAFTER" --quantization 4bit --card "RTX A6000" --context 16384 --batch 5
exec eagle31 serve "$TARGET" "$DRAFTER" --quantization 4bit \
  --memory auto --context 16384 --max-batch 4 "$@"
