"""Many clients on one `eagle31 serve`: is anything lost or wrong, does memory grow, does anybody's stream stall?

    python examples/studies/load_on_server.py --seconds 600 --json docs/records/load.json

Starts a server with the embedded pair in float32, asks it alone for a while and then with all clients at once. Of
twenty requests one is cancelled after its first pieces and one is malformed; every fourth has a long prompt. Each whole
answer is compared with plain `generate`. Exit code 1 if an answer is lost or wrong. Beside the speeds, which want a
machine without other work, the record counts what they come from: rounds, texts per round, prompt tokens read, and
tokens per second of the server's processor time.
"""

import argparse
import asyncio
import itertools
import json
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from statistics import median, quantiles

import httpx2
import openai
import psutil
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle31_hf.demo import CONVERSATIONS, target_path
from eagle31_hf.measure.origin import origin

NEW_TOKENS, LONG_TURNS, CANCELLED, MALFORMED = 96, 6, 7, 13  # the last two: which of twenty requests
SERVE = [sys.executable, "-c", "from eagle31_hf.cli import main; main()", "serve", "--dtype", "float32", "--port", "0"]


def questions():
    """Prompts and what plain decoding answers."""
    tokenizer = AutoTokenizer.from_pretrained(target_path())
    target = AutoModelForCausalLM.from_pretrained(target_path(), dtype="float32")
    for number, messages in enumerate(CONVERSATIONS):
        asked = list(messages)
        if number % 4 == 3:  # the conversation behind itself, several times
            asked = [*asked, {"role": "assistant", "content": "Very well."}] * LONG_TURNS + asked
        inputs = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        output = target.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)
        yield asked, tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


async def ask(client, number, asked, expected, gaps):
    """One request: what became of it, and its tokens; seconds between two pieces go to `gaps`."""
    malformed = number % 20 == MALFORMED
    settings = {"max_tokens": NEW_TOKENS, "temperature": "hot" if malformed else 0}
    text, moments, tokens = "", [], 0
    try:
        stream = await client.chat.completions.create(
            model="eagle31-demo", messages=asked, **settings, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            tokens += chunk.usage.completion_tokens if chunk.usage else 0
            if chunk.choices and chunk.choices[0].delta.content:
                text += chunk.choices[0].delta.content
                moments.append(time.monotonic())
            if number % 20 == CANCELLED and len(moments) == 2:
                await stream.close()
                return "cancelled", tokens
    except openai.OpenAIError as error:
        if malformed and isinstance(error, openai.BadRequestError):
            return "refused", tokens
        print(f"lost: {error!r}", file=sys.stderr)
        return "lost", tokens
    finally:
        gaps += [after - before for before, after in itertools.pairwise(moments)]
    if text.strip() == expected.strip():
        return "right", tokens
    print(f"wrong: {text!r}, not {expected!r}", file=sys.stderr)
    return "wrong", tokens


async def load(client, asking, clients, seconds, most):
    """All clients, each with one request after the other, until the time is up or enough was asked: what became of the
    requests, seconds between pieces, tokens per second."""
    counts, gaps = dict.fromkeys(("right", "wrong", "lost", "cancelled", "refused", "tokens"), 0), []
    numbers, began = itertools.count(), time.monotonic()

    async def one():
        while time.monotonic() < began + seconds and (number := next(numbers)) < most:
            what, tokens = await ask(client, number, *asking[number % len(asking)], gaps)
            counts[what] += 1
            counts["tokens"] += tokens

    await asyncio.gather(*(one() for _ in range(clients)))
    return counts, gaps, counts["tokens"] / (time.monotonic() - began)


def figures(address, server):
    """What the server has counted until now, by Prometheus' names."""
    text = httpx2.get(address.removesuffix("/v1") + "/metrics").text
    counts = Counter(cpu_s=sum(server.cpu_times()[:2]))
    for sample in (sample for family in text_string_to_metric_families(text) for sample in family.samples):
        counts["_".join([sample.name, *sample.labels.values()]).removeprefix("eagle31_")] = sample.value
    return counts


def counted(before, after):
    """What the server did in between, by its own count."""
    more = Counter(after)
    more.subtract(before)
    return {
        "rounds": more["rounds_total"],
        "texts_per_round": more["text_rounds_total"] / more["rounds_total"],
        "prompt_tokens": more["tokens_total_prompt"],
        "prompt_tokens_read": more["tokens_total_prompt"] - more["tokens_total_cached"],
        "drafted": more["draft_tokens_total_drafted"],
        "accepted": more["draft_tokens_total_accepted"],
        "tok_per_cpu_s": more["tokens_total_completion"] / more["cpu_s"],
        "cache_bytes_before": before["cache_bytes"],
        "cache_bytes_after": after["cache_bytes"],
    }


async def measure(address, server, told):
    asking = list(questions())
    client = openai.AsyncOpenAI(base_url=address, api_key="none", timeout=600)
    await load(client, asking, told.clients, told.seconds / 10, told.requests)  # caches have their size after it
    warm = figures(address, server)
    _, _, alone = await load(client, asking, 1, told.seconds / 10, told.requests)
    started, before = figures(address, server), server.memory_info().rss
    counts, gaps, together = await load(client, asking, told.clients, told.seconds, told.requests)
    gap_median_s, gap_p99_s = median(gaps), quantiles(gaps, n=100)[98]
    return {
        **counts,
        "clients": told.clients,
        "tok_per_s_alone": alone,
        "tok_per_s": together,
        "over_alone": together / alone,
        "gap_median_s": gap_median_s,
        "gap_p99_s": gap_p99_s,
        "gap_p99_over_median": gap_p99_s / gap_median_s,
        "counted_alone": counted(warm, started),
        "counted": counted(started, figures(address, server)),
        "resident_bytes_before": before,
        "resident_bytes_after": server.memory_info().rss,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=600, help="with all clients; a fifth more before")
    parser.add_argument("--requests", type=int, default=10**9, help="stop after so many, however early")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    told = parser.parse_args()
    with subprocess.Popen([*SERVE, "--max-batch", str(told.clients)], stdout=subprocess.PIPE, text=True) as server:
        try:
            address = next(found[0] for line in server.stdout if (found := re.search(r"http://\S+", line)))
            record = asyncio.run(measure(address, psutil.Process(server.pid), told))
        finally:
            server.terminate()
    record = {**origin(), **record}
    print(json.dumps(record, indent=2))
    if told.json:
        told.json.write_text(json.dumps(record, indent=2) + "\n")
    sys.exit(bool(record["lost"] or record["wrong"]))


if __name__ == "__main__":
    main()
