"""A prompt set in one call."""

import json


def write_prompts(path, n_train: int, n_heldout: int):
    words = (
        "the young eagle leaves its nest before it can hunt and someone has to teach it what "
        "the old bird knows"
    ).split()
    lines = []
    for n in range(n_train + n_heldout):
        ask, answer = (
            " ".join(words[(n * 7 + i) % len(words)] for i in range(3 + n % 9)),
            " ".join(words[(n * 3 + i) % len(words)] for i in range(4 + n % 13)),
        )
        split = "train" if n < n_train else "heldout"
        lines.append(
            {
                "id": f"p{n:03d}",
                "category": "chat",
                "topic": f"{split}-{n % 5}",
                "split": split,
                "messages": [
                    {"role": "user", "content": ask},
                    {"role": "assistant", "content": answer},
                ],
            }
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
