"""A text-generation pipeline with a drafter: everything else about the pipeline stays as it is."""

from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from eagle31_hf import Eagle31Drafter
from eagle31_hf.demo import drafter_path, target_path

tokenizer = AutoTokenizer.from_pretrained(target_path())
target = AutoModelForCausalLM.from_pretrained(target_path(), dtype="auto")
eagle = Eagle31Drafter.from_pretrained(drafter_path(), target=target)

chat = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=eagle)
messages = [{"role": "user", "content": "What is the weather going to be like in Portland this weekend?"}]
answer = chat(messages, do_sample=False, max_new_tokens=64)
print(answer[0]["generated_text"][-1]["content"])
print(eagle.stats)
