"""Text as it is written, as a web page would show it: `generate` in a thread, `TextIteratorStreamer` here.

A round's accepted tokens arrive together, so pieces come less often and are longer than one token.
"""

from threading import Thread

from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

from eagle31_hf import Eagle31Drafter
from eagle31_hf.demo import drafter_path, target_path

tokenizer = AutoTokenizer.from_pretrained(target_path())
target = AutoModelForCausalLM.from_pretrained(target_path(), dtype="auto")
eagle = Eagle31Drafter.from_pretrained(drafter_path(), target=target)

messages = [{"role": "user", "content": "I would like to reserve a table at an Italian restaurant in Oakland."}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def write() -> None:
    try:
        target.generate(**inputs, assistant_model=eagle, do_sample=False, max_new_tokens=64, streamer=streamer)
        print(f"\n{eagle.stats}")  # a thread's own figures
    finally:
        streamer.end()  # whatever happens, the loop below comes to its end


thread = Thread(target=write)
thread.start()
for piece in streamer:
    print(piece, end="", flush=True)
thread.join()
