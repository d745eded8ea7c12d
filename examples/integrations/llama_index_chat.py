"""LlamaIndex's Hugging Face class with a drafter: `generate_kwargs` go to `generate` as they are.

pip install llama-index-llms-huggingface
"""

from llama_index.core.llms import ChatMessage
from llama_index.llms.huggingface import HuggingFaceLLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle31_hf import Eagle31Drafter
from eagle31_hf.demo import drafter_path, target_path

tokenizer = AutoTokenizer.from_pretrained(target_path())
target = AutoModelForCausalLM.from_pretrained(target_path(), dtype="auto")
eagle = Eagle31Drafter.from_pretrained(drafter_path(), target=target)

settings = {"assistant_model": eagle, "do_sample": False}
llm = HuggingFaceLLM(
    model=target, tokenizer=tokenizer, max_new_tokens=64, context_window=1024, generate_kwargs=settings
)
answer = llm.chat([ChatMessage(role="user", content="What is the weather going to be like in Portland this weekend?")])
print(answer.message.content)
print(eagle.stats)
