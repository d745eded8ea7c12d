#!/bin/sh
# One 24 GB card: Llama 3.1 8B in 4 bit, four texts of 16k tokens at once. The plan is printed before anything is loaded.
set -e  # the plan has a row more than texts are served at once: prompts are read in one of their own
TARGET=${TARGET:-meta-llama/Llama-3.1-8B-Instruct}
DRAFTER=${DRAFTER:-yuhuili/EAGLE3-LLaMA3.1-Instruct-8B}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
eagle31 plan "$TARGET" --drafter "$DRAFTER" --quantization 4bit --card "RTX 4090" --context 16384 --batch 5
exec eagle31 serve "$TARGET" "$DRAFTER" --quantization 4bit \
  --memory auto --context 16384 --max-batch 4 "$@"
