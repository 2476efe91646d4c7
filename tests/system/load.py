"""Runs inside a machine under test: load.py CLIENTS TOKENS SECONDS. Streams chat answers one after the other on each client.

Each client asks at least once; SECONDS after the start none asks anew: with 0 each has exactly one answer.
Prints "flowing" once every client has had a token, then one JSON document. An answer counts as done only when it ended
with its finish_reason and [DONE].
"""

import http.client
import json
import sys
import threading
import time

CLIENTS, TOKENS, SECONDS = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
done, failed, gaps = [], [], []
flowing = [threading.Event() for _ in range(CLIENTS)]


def ask(number: int) -> None:
    """One streamed answer."""
    connection = http.client.HTTPConnection("127.0.0.1", 8000, timeout=180)
    body = {"model": "SmolLM2-135M-Instruct", "stream": True, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0,
            "messages": [{"role": "user", "content": f"Count from {number} upwards."}]}  # fmt: skip
    began = last = time.monotonic()
    tokens, finish, end = 0, None, False
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status} {answer.read()[:300]!r}")
        for line in answer:
            if line.strip() == b"data: [DONE]":
                end = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
                tokens += 1
                flowing[number].set()
                gaps.append(time.monotonic() - last)
                last = time.monotonic()
                finish = event["choices"][0].get("finish_reason") or finish
        if not (end and finish):
            raise RuntimeError(f"the stream ended after {tokens} events without finish_reason and [DONE]")
        done.append(time.monotonic() - began)
    except Exception as error:  # noqa: BLE001 - whatever a client meets is a failed request
        failed.append(f"client {number}, {time.monotonic() - began:.2f} s, {tokens} events: {type(error).__name__}: {error}")
        flowing[number].set()
    finally:
        connection.close()


def work(number: int, until: float) -> None:
    """Ask, and again while there is time."""
    ask(number)
    while time.monotonic() < until:
        ask(number)


until = time.monotonic() + SECONDS
threads = [threading.Thread(target=work, args=(number, until)) for number in range(CLIENTS)]
for thread in threads:
    thread.start()
for event in flowing:
    event.wait(120)
print("flowing", flush=True)
for thread in threads:
    thread.join()
print(json.dumps({"done": len(done), "failed": failed, "longest_gap_s": max(gaps, default=0), "longest_answer_s": max(done, default=0)}))
