#!/bin/sh
# Apple silicon with 36 GB and more: Llama 3.1 8B in bf16 (bitsandbytes has no kernels for Metal), two texts of 16k tokens.
set -e  # the plan has a row more than texts are served at once: prompts are read in one of their own
TARGET=${TARGET:-meta-llama/Llama-3.1-8B-Instruct}
DRAFTER=${DRAFTER:-yuhuili/EAGLE3-LLaMA3.1-Instruct-8B}
eagle31 plan "$TARGET" --drafter "$DRAFTER" --quantization bf16 --card "M3 Max 36GB" --context 16384 --batch 3
exec eagle31 serve "$TARGET" "$DRAFTER" --dtype bfloat16 --device mps \
  --memory auto --context 16384 --max-batch 2 "$@"
