"""Keep what a client of OpenAI's API sends to a server: a proxy between the two that writes each request down.

    eagle31 serve                                                # or any other server
    python examples/studies/record_requests.py --client NAME --version 1.2 --out tests/serving/recorded
    # now let the client ask http://127.0.0.1:8010/v1 for what it can: chats, streams, tools, JSON; then Ctrl-C

`tests/serving/test_recorded.py` replays the files in that folder. Requests that are the same are kept once, of the
headers those that a server may read; keys are not kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2

KEPT_HEADERS = ("accept", "content-type", "user-agent")


class Recorder(ThreadingHTTPServer):
    """Passes requests on to `server`, such as `http://127.0.0.1:8000`, and keeps them in `requests`."""

    def __init__(self, server: str, port: int = 0):
        super().__init__(("127.0.0.1", port), PassOn)
        self.upstream, self.requests = httpx2.Client(base_url=server, timeout=600), []

    def write(self, path: Path, client: str, version: str) -> None:
        """The requests so far, one a line."""
        once: Iterable[Any] = {json.dumps(each, sort_keys=True): each for each in self.requests}.values()
        lines = ",\n".join(json.dumps(each, ensure_ascii=False, separators=(",", ":")) for each in once)
        head = json.dumps({"client": client, "version": version})[:-1]
        path.write_text(f'{head}, "requests": [\n{lines}\n]}}\n', encoding="utf-8")


class PassOn(BaseHTTPRequestHandler):
    """One request and its answer, piece by piece."""

    server: Recorder

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name: self.headers[name] for name in KEPT_HEADERS if name in self.headers}
        kept = {"method": self.command, "path": self.path, "headers": headers}
        self.server.requests.append({**kept, "body": json.loads(body)} if body else kept)
        with self.server.upstream.stream(self.command, self.path, headers=headers, content=body) as answer:
            self.send_response(answer.status_code)
            self.send_header("content-type", answer.headers.get("content-type", "application/json"))
            self.send_header("connection", "close")
            self.end_headers()
            for piece in answer.iter_bytes():
                self.wfile.write(piece)

    do_POST = do_GET


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--client", required=True, help="its package's name; the file is called so")
    parser.add_argument("--version", required=True, help="its version")
    parser.add_argument("--out", type=Path, required=True, help="folder for the file")
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--port", type=int, default=8010, help="where the client asks")
    options = parser.parse_args()
    recorder = Recorder(options.server, options.port)
    print(f"passing requests on to {options.server} from http://127.0.0.1:{options.port}/v1; Ctrl-C ends it")
    try:
        recorder.serve_forever()
    except KeyboardInterrupt:
        recorder.write(options.out / f"{options.client}.json", options.client, options.version)
        print(f"{len(recorder.requests)} requests in {options.out / options.client}.json")


if __name__ == "__main__":
    main()
