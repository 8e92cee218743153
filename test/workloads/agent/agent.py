# SPDX-License-Identifier: Apache-2.0
"""A per-user agent service, of the kind that takes long to start and is cheap to ask.

At the start it reads a corpus (generated, always the same) and builds from it an inverted index with positions and a
table of embeddings: some seconds of work and more than 256 MiB of Python objects. Then it listens on :8080:

  GET /ask?q=WORDS   {"session": N, "answer": [...]}: the documents that fit best; N counts the questions in memory
  GET /checksum      {"session": N, "checksum": "..."}: over all of index and table; does not count

Environment: DOCUMENTS is the size of the corpus, 60000 if unset.
"""

import array
import json
import math
import os
import random
import sys
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

DOCUMENTS = int(os.environ.get("DOCUMENTS", "60000"))
WORDS_PER_DOCUMENT = 40
DIMENSIONS = 64


def vocabulary(size):
    syllables = ["ka", "ro", "mi", "ten", "lu", "sa", "vor", "ne", "di", "pel", "go", "ash", "ri", "um", "be", "tol"]
    return ["".join(syllables[(n >> shift) & 15] for shift in (12, 8, 4, 0)) for n in range(size)]


class Corpus:
    """Documents, an index over their words, and an embedding for each."""

    def __init__(self, documents):
        pick = random.Random(42)
        words = vocabulary(20000)
        self.titles = []
        self.index = {}  # word -> list of (document, position, weight)
        self.embeddings = array.array("d")
        axes = {w: zlib.crc32(w.encode()) for w in words}
        for document in range(documents):
            # Few words are frequent and many rare, as in any language.
            text = [words[int(pick.paretovariate(0.6)) % len(words)] for _ in range(WORDS_PER_DOCUMENT)]
            self.titles.append(" ".join(text[:6]) + " #%d" % document)
            vector = [0.0] * DIMENSIONS
            for position, word in enumerate(text):
                self.index.setdefault(word, []).append((document, position, 1.0 / (1 + position) + document * 1e-9))
                vector[axes[word] % DIMENSIONS] += 1.0
            norm = math.sqrt(sum(x * x for x in vector))
            self.embeddings.extend(x / norm for x in vector)

    def search(self, query):
        scores = {}
        for word in query.split():
            # The newest postings first; the whole list of a frequent word is long.
            for document, _, weight in self.index.get(word, [])[-500:]:
                scores[document] = scores.get(document, 0.0) + weight
        best = sorted(scores, key=lambda d: (-scores[d], d))[:3]
        rows = {d: self.embeddings[d * DIMENSIONS : (d + 1) * DIMENSIONS] for d in best}
        return [{"title": self.titles[d], "score": round(scores[d], 9), "peak": round(max(rows[d]), 9)} for d in best]

    def checksum(self):
        total = zlib.crc32(self.embeddings)
        for word in sorted(self.index):
            total = zlib.crc32(repr((word, self.index[word])).encode(), total)
        for title in self.titles:
            total = zlib.crc32(title.encode(), total)
        return "%08x" % total


class Session:
    """What the user and the agent did so far. Only in memory."""

    def __init__(self):
        self.lock = threading.Lock()
        self.count = 0
        self.history = []

    def add(self, question):
        with self.lock:
            self.count += 1
            self.history.append(question)
            return self.count


def serve(corpus, session):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            url = urlsplit(self.path)
            if url.path == "/ask":
                question = parse_qs(url.query).get("q", [""])[0]
                answer = corpus.search(question)
                reply = {"session": session.add(question), "answer": answer}
            elif url.path == "/checksum":
                reply = {"session": session.count, "checksum": corpus.checksum()}
            else:
                self.send_error(404)
                return
            body = (json.dumps(reply) + "\n").encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    ThreadingHTTPServer(("", 8080), Handler).serve_forever()


def main():
    started = time.monotonic()
    print("reading the corpus", flush=True)
    corpus = Corpus(DOCUMENTS)
    print("ready after %.1f s with %d words" % (time.monotonic() - started, len(corpus.index)), flush=True)
    serve(corpus, Session())


if __name__ == "__main__":
    sys.exit(main())
