"""What a browser sees at `/`, and what is said at addresses of other APIs."""

from __future__ import annotations

from html import escape

_CHAT = "ask /v1/chat/completions (in the openai package: client.chat.completions.create)"
ELSEWHERE = {
    "/v1/responses": f"{_CHAT}; conversations are not stored here, so send all messages each time",
    "/v1/messages": f"{_CHAT}; this is OpenAI's API, not Anthropic's",
    "/v1/embeddings": "this server writes texts and has no embeddings; run a server for them beside it",
    "/v1/rerank": "this server writes texts and ranks none; run a server for that beside it",
    "/v1/moderations": "nothing is moderated here",
    "/v1/images/generations": "only text is written here",
    "/v1/audio/transcriptions": "only text is read here",
    "/v1/audio/speech": "only text is written here",
    "/api/chat": f"{_CHAT}; this is OpenAI's API, not Ollama's",
    "/api/generate": "ask /v1/completions; this is OpenAI's API, not Ollama's",
    "/api/tags": "ask /v1/models; this is OpenAI's API, not Ollama's",
    "/completion": "ask /v1/completions; this is OpenAI's API, not llama.cpp's own",
}
"""Addresses that clients of other servers ask, and what to ask instead."""

ADDRESSES = (
    ("POST", "/v1/chat/completions", "chats, streams, tools, JSON by a schema"),
    ("POST", "/v1/completions", "texts that go on"),
    ("GET", "/v1/models", "the model served here"),
    ("GET", "/health", "whether requests are taken, and how many wait"),
    ("GET", "/metrics", "figures for Prometheus"),
)

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 3rem auto; padding: 0 1rem; }
td { padding: .2rem 1rem .2rem 0; vertical-align: top; }
pre { padding: .8rem; border: 1px solid #8888; border-radius: .4rem; overflow-x: auto; }
"""


def front_page(*, model: str, base: str, facts: dict[str, str], needs_key: bool) -> str:
    """HTML that says what runs here and how to ask it; it loads nothing from elsewhere.

    Args:
        model: the name clients ask for.
        base: address of this server, without a slash at its end.
        facts: what else there is to say, by name.
        needs_key: whether clients have to show a key.
    """
    key = ' -H "Authorization: Bearer $EAGLE31_API_KEY"' if needs_key else ""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    ask = f"curl {base}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n  -d '{body}'"
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in facts.items())
    addresses = "".join(
        f"<tr><td>{method}</td><td><code>{path}</code></td><td>{what}</td></tr>" for method, path, what in ADDRESSES
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(model)}: eagle31 serve</title>"
        f"<style>{_STYLE}</style><h1>{escape(model)}</h1>"
        "<p>A server that speaks OpenAI's API: <code>eagle31 serve</code>. Clients want the base URL "
        f"<code>{escape(base)}/v1</code> and the model name above"
        f"{', and the key it was started with' if needs_key else '; any key will do'}.</p>"
        f"<table>{rows}</table><h2>Ask it</h2><pre>{escape(ask)}</pre>"
        f"<h2>Addresses</h2><table>{addresses}</table></html>\n"
    )
