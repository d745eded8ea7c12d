"""LangChain's Hugging Face classes with a drafter: pass a pipeline that has one.

pip install langchain-huggingface
"""

from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from eagle31_hf import Eagle31Drafter
from eagle31_hf.demo import drafter_path, target_path

tokenizer = AutoTokenizer.from_pretrained(target_path())
target = AutoModelForCausalLM.from_pretrained(target_path(), dtype="auto")
eagle = Eagle31Drafter.from_pretrained(drafter_path(), target=target)

settings = {"do_sample": False, "max_new_tokens": 64, "return_full_text": False}
write = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=eagle, **settings)
chat = ChatHuggingFace(llm=HuggingFacePipeline(pipeline=write), tokenizer=tokenizer)
answer = chat.invoke([("user", "I would like to reserve a table at an Italian restaurant in Oakland.")])
print(answer.content)
print(eagle.stats)
