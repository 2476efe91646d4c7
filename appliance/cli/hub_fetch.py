"""`python hub_fetch.py`: one look at a hub, or one fetch from it, for `appliancectl model add hf:...`.

Run by path with the interpreter of an engine's environment, which has huggingface_hub: nothing else of ours is imported. The question is
a line of JSON on standard input: {"repo", "revision", "folder", "only"}; without a folder it is what the model would take, `only` names
the files to fetch where not all are wanted. The answer is the last
line of standard output: {"commit", "files": {name: bytes}}. The token comes as HF_TOKEN.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

WANTED = (".json", ".safetensors", ".jinja", ".model", ".txt", ".tiktoken")
"""What engines read. Weights in other formats, code and pictures are left there; a repository of GGUF files has no use for them either."""
LARGE_BYTES = 64 * 1024**2
MOST_BY_HTTP_BYTES = 50 * 10**9
"""Larger files a hub hands out in its own protocol only."""
SHA256_DIGITS = 64
_OF_TRAINING = ("optimizer", "training_args", "trainer_state")


def is_wanted(name: str) -> bool:
    """Of a repository's files; those in folders are other formats of the same weights (original/, onnx/)."""
    return "/" not in name and name.endswith(WANTED) and not name.startswith(_OF_TRAINING)


def look(repo: str, revision: str | None) -> dict[str, Any]:
    """The commit, and the files that are wanted of it with their sizes."""
    from huggingface_hub import HfApi

    about = HfApi().model_info(repo, revision=revision, files_metadata=True)
    files = {entry.rfilename: entry.size or 0 for entry in about.siblings or () if is_wanted(entry.rfilename)}
    if any(name.startswith("model") and name.endswith(".safetensors") for name in files):  # else they would come twice
        files = {name: size for name, size in files.items() if not name.startswith("consolidated")}
    return {"commit": about.sha, "files": files}


def fetch(repo: str, commit: str, files: dict[str, int], folder: str) -> None:
    """Each into the folder; what lies there whole is kept, what lies there in part goes on."""
    from huggingface_hub import hf_hub_download

    for name, size in sorted(files.items()):
        if LARGE_BYTES < size < MOST_BY_HTTP_BYTES:
            _fetch_large(repo, commit, name, size, Path(folder))
        else:
            hf_hub_download(repo, name, revision=commit, local_dir=folder)


def _fetch_large(repo: str, commit: str, name: str, size: int, folder: Path) -> None:
    """hf_hub_download throws away what it has of a file when it is ended: hours of a slow line. This goes on, and holds it to its hash."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined,unused-ignore]

    whole = folder / name
    if whole.exists():
        return
    url = hf_hub_url(repo, name, revision=commit)
    etag = get_hf_file_metadata(url).etag or ""
    part = folder / ".cache" / f"{name}.{etag}.part"
    part.parent.mkdir(exist_ok=True)
    with part.open("ab") as stream:
        http_get(url, stream, resume_size=stream.tell(), headers=build_hf_headers(), expected_size=size)
    with part.open("rb") as stream:
        if len(etag) == SHA256_DIGITS and hashlib.file_digest(stream, "sha256").hexdigest() != etag:
            part.unlink()
            raise OSError(f"{name} did not arrive as it was sent: its hash is another; it is fetched anew at the next try")
    part.rename(whole)


def main() -> None:
    """One question. What the hub's client raises ends it, and is read from the last lines of its traceback."""
    asked = json.loads(sys.stdin.readline())
    answer = look(asked["repo"], asked["revision"])
    if asked["folder"]:
        files = {name: size for name, size in answer["files"].items() if not asked["only"] or name in asked["only"]}
        fetch(asked["repo"], answer["commit"], files, asked["folder"])
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
