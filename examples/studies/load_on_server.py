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
from dataclasses import dataclass, field
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


@dataclass
class Seen:
    """What became of the requests, and the seconds between two pieces of a stream."""

    right: int = 0
    wrong: int = 0
    lost: int = 0
    cancelled: int = 0
    refused: int = 0
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)


def long_prompt(messages):
    """The conversation behind itself, several times."""
    answered = [*messages, {"role": "assistant", "content": "Very well."}]
    return [*answered * LONG_TURNS, *messages]


def questions():
    """Prompts and what plain decoding answers."""
    tokenizer = AutoTokenizer.from_pretrained(target_path())
    target = AutoModelForCausalLM.from_pretrained(target_path(), dtype="float32")
    for number, messages in enumerate(CONVERSATIONS):
        asked = long_prompt(messages) if number % 4 == 3 else list(messages)
        inputs = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        output = target.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)
        yield asked, tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


async def ask(client, number, asked, expected, seen):
    """One request, and what became of it."""
    malformed = number % 20 == MALFORMED
    try:
        stream = await client.chat.completions.create(
            model="eagle31-demo",
            messages=asked,
            max_tokens=NEW_TOKENS,
            temperature="hot" if malformed else 0,
            stream=True,
            stream_options={"include_usage": True},
        )
        text, pieces, last = "", 0, None
        async for chunk in stream:
            seen.tokens += chunk.usage.completion_tokens if chunk.usage else 0
            if chunk.choices and chunk.choices[0].delta.content:
                now = time.monotonic()
                seen.gaps += [] if last is None else [now - last]
                text, pieces, last = text + chunk.choices[0].delta.content, pieces + 1, now
            if number % 20 == CANCELLED and pieces == 2:
                await stream.close()
                seen.cancelled += 1
                return
        if text.strip() == expected.strip():
            seen.right += 1
        else:
            seen.wrong += 1
            print(f"wrong: {text!r}, not {expected!r}", file=sys.stderr)
    except openai.BadRequestError:
        seen.refused += malformed
        seen.lost += not malformed
    except openai.OpenAIError as error:
        seen.lost += 1
        print(f"lost: {error!r}", file=sys.stderr)


async def load(client, asking, clients, seconds, most):
    """All clients, each with one request after the other, until the time is up or enough was asked."""
    seen, numbers, ends = Seen(), itertools.count(), time.monotonic() + seconds

    async def one():
        while time.monotonic() < ends and (number := next(numbers)) < most:
            await ask(client, number, *asking[number % len(asking)], seen)

    began = time.monotonic()
    await asyncio.gather(*(one() for _ in range(clients)))
    return seen, seen.tokens / (time.monotonic() - began)


def figures(address, server):
    """What the server has counted until now."""
    text = httpx2.get(address.removesuffix("/v1") + "/metrics").text
    told = {
        "_".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    return {**told, "cpu_s": sum(server.cpu_times()[:2])}


def counted(before, after):
    """What the server did in between, by its own count."""

    def more(name):
        return after[name] - before.get(name, 0)

    written = more("eagle31_tokens_total_completion")
    return {
        "rounds": more("eagle31_rounds_total"),
        "texts_per_round": more("eagle31_text_rounds_total") / more("eagle31_rounds_total"),
        "prompt_tokens": more("eagle31_tokens_total_prompt"),
        "prompt_tokens_read": more("eagle31_tokens_total_prompt") - more("eagle31_tokens_total_cached"),
        "drafted": more("eagle31_draft_tokens_total_drafted"),
        "accepted": more("eagle31_draft_tokens_total_accepted"),
        "tok_per_cpu_s": written / more("cpu_s"),
        "cache_bytes_before": before["eagle31_cache_bytes"],
        "cache_bytes_after": after["eagle31_cache_bytes"],
    }


async def measure(address, server, told):
    asking = list(questions())
    client = openai.AsyncOpenAI(base_url=address, api_key="none", timeout=600)
    await load(client, asking, told.clients, told.seconds / 10, told.requests)  # caches have their size after it
    warm = figures(address, server)
    _, alone = await load(client, asking, 1, told.seconds / 10, told.requests)
    started, before = figures(address, server), server.memory_info().rss
    seen, together = await load(client, asking, told.clients, told.seconds, told.requests)
    counts = {name: getattr(seen, name) for name in ("right", "wrong", "lost", "cancelled", "refused", "tokens")}
    return {
        **counts,
        "clients": told.clients,
        "tok_per_s_alone": alone,
        "tok_per_s": together,
        "over_alone": together / alone,
        "gap_median_s": median(seen.gaps),
        "gap_p99_s": quantiles(seen.gaps, n=100)[98],
        "gap_p99_over_median": quantiles(seen.gaps, n=100)[98] / median(seen.gaps),
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
