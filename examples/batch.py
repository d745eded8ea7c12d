"""Several prompts at once: pad on the left, as for any `generate`. Each row accepts its own number of drafts."""

from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle31_hf import Eagle31Drafter
from eagle31_hf.demo import CONVERSATIONS, drafter_path, target_path

tokenizer = AutoTokenizer.from_pretrained(target_path(), padding_side="left")
target = AutoModelForCausalLM.from_pretrained(target_path(), dtype="float32")
eagle = Eagle31Drafter.from_pretrained(drafter_path(), target=target)

inputs = tokenizer.apply_chat_template(
    list(CONVERSATIONS), add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
)
output = target.generate(**inputs, assistant_model=eagle, do_sample=False, max_new_tokens=64)

for row in output[:, inputs["input_ids"].shape[1] :]:
    print("-", tokenizer.decode(row, skip_special_tokens=True))
print(eagle.stats)
