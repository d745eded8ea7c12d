"""The shortest way: load a target and its drafter, generate, look at the figures. Needs no network."""

from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle31_hf import Eagle31Drafter
from eagle31_hf.demo import drafter_path, target_path

tokenizer = AutoTokenizer.from_pretrained(target_path())
target = AutoModelForCausalLM.from_pretrained(target_path(), dtype="auto")
eagle = Eagle31Drafter.from_pretrained(drafter_path(), target=target)

messages = [{"role": "user", "content": "A baker sells 12 trays with 8 rolls each. How many rolls does she sell?"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
output = target.generate(**inputs, assistant_model=eagle, do_sample=False, max_new_tokens=128)

print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(eagle.stats)
