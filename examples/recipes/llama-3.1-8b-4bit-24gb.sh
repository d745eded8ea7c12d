#!/bin/sh
# A drafter for Llama 3.1 8B as one 24 GB card serves it: the target in 4 bit writes its own answers, and the drafter
# learns from the hidden states of the quantised target. Any chat data set will do for prompts; only its user turns
# are kept. Not yet run on a card of this size: watch how many minutes its bar says are left.
exec eagle31 train meta-llama/Llama-3.1-8B-Instruct \
  --prompts HuggingFaceH4/ultrachat_200k:train_sft --max-rows 60000 \
  --out llama-3.1-8b-4bit-eagle31 \
  --quantization 4bit --dtype bfloat16 \
  --regenerate each --max-new-tokens 512 --write-rows 16 \
  --max-length 2048 --batch-rows 1 --accumulate 16 \
  --ttt-steps 4 --learning-rate 1e-4 --epochs 2 \
  --eval-steps 500 "$@"
