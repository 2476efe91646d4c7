"""llama.cpp's own HTTP server out of the wheel `xllamacpp`, with the four options of llama-server that recovery.py uses.

Without a llama-server on the machine: an environment with xllamacpp in it, and
`--llama-server "ENV/bin/python tests/bench/_llama_server.py"`.
"""

from __future__ import annotations

import argparse
import signal

import xllamacpp  # type: ignore[import-not-found]  # never in our own environment


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", dest="model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("-t", dest="threads", type=int, required=True)
    parser.add_argument("-c", dest="context", type=int, required=True)
    options = parser.parse_args()
    parameters = xllamacpp.CommonParams()
    parameters.model.path = options.model
    parameters.hostnames, parameters.port = ["127.0.0.1"], options.port
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = options.threads
    parameters.n_ctx, parameters.use_jinja = options.context, True
    server = xllamacpp.Server(parameters)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
