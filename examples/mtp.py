"""Draft with the multi-token-prediction head that the target's own checkpoint holds. Run: python mtp.py [model]"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle31_hf import Eagle31Drafter

name = sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3.5-4B"
tokenizer = AutoTokenizer.from_pretrained(name)
target = AutoModelForCausalLM.from_pretrained(name, dtype="auto", device_map="auto")
eagle = Eagle31Drafter.from_pretrained(name, target=target)  # reads the head alone

inputs = tokenizer("def fibonacci(n):", return_tensors="pt").to(target.device)
out = target.generate(**inputs, assistant_model=eagle, max_new_tokens=128)
print(tokenizer.decode(out[0], skip_special_tokens=True))
print(eagle.stats)
