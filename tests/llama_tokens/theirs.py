"""The tokens of texts by llama.cpp, from the vocabulary of a GGUF file; needs llama-cpp-python.

    python theirs.py FILE < questions > answers

Questions: a JSON list of [text, add_special, parse_special]; answers: a JSON list of lists of ids. Must not know:
Quire.
"""

from __future__ import annotations

import ctypes
import json
import sys

import llama_cpp


@llama_cpp.llama_log_callback
def _silent(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """llama.cpp tells much of each file."""


def main() -> int:
    llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    how = llama_cpp.llama_model_default_params()
    how.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), how)
    if not model:
        print(f"{sys.argv[1]}: llama.cpp does not read it", file=sys.stderr)
        return 1
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    answers = []
    for text, add_special, parse_special in json.load(sys.stdin):
        data = text.encode()
        most = len(data) + 8
        ids = (llama_cpp.llama_token * most)()
        count = llama_cpp.llama_tokenize(vocabulary, data, len(data), ids, most, add_special, parse_special)
        answers.append(ids[:count] if count >= 0 else None)
    json.dump(answers, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
