#!/bin/sh
# The same on several cards by accelerate: each card holds a whole bf16 target, writes its share of the answers and
# trains on its share of the batch; the loss is that of one card with the whole batch. CARDS says how many.
exec accelerate launch --multi_gpu --num_processes "${CARDS:-4}" --mixed_precision bf16 "$(command -v eagle31)" \
  train meta-llama/Llama-3.1-8B-Instruct \
  --prompts HuggingFaceH4/ultrachat_200k:train_sft \
  --out llama-3.1-8b-eagle31 \
  --dtype bfloat16 \
  --regenerate each --max-new-tokens 1024 --write-rows 32 \
  --max-length 4096 --batch-rows 1 --accumulate 8 \
  --ttt-steps 7 --learning-rate 1e-4 --epochs 2 \
  --eval-steps 1000 "$@"
