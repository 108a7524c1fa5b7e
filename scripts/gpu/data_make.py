"""Text and questions for `run.sh --only data`, and the comparison of two sets of grades.

python data_make.py FOLDER                       text.txt and questions.jsonl, as many and as long as HellaSwag's
python data_make.py --compare A.jsonl B.jsonl    fails if a log-likelihood differs by more than 1e-4 of itself
"""

import json
import random
import sys
from pathlib import Path

SYLLABLES = ["ka", "lo", "mi", "ter", "sun", "ra", "ven", "dol", "pi", "est", "or", "an", "quil", "bre", "tho", "ing"]
TEXT_BYTES = 40_000_000
QUESTIONS = 10_042  # in HellaSwag's validation set
TOLERANCE = 1e-4


def make(folder: Path) -> None:
    rng = random.Random(1)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(20_000)]

    def sentence(low: int, high: int) -> str:
        return " ".join(rng.choices(words, k=rng.randint(low, high))) + "."

    paragraph = "\n".join(sentence(5, 30) for _ in range(20_000))
    text = "\n\n".join(paragraph for _ in range(TEXT_BYTES // len(paragraph) + 1))
    (folder / "text.txt").write_text(text[:TEXT_BYTES])
    with (folder / "questions.jsonl").open("w") as out:
        for at in range(QUESTIONS):
            question = {
                "activity_label": "Work",
                "ctx": sentence(10, 45),
                "endings": [sentence(5, 20) for _ in range(4)],
                "label": at % 4,
            }
            out.write(json.dumps(question) + "\n")


def compare(ours: Path, theirs: Path) -> int:
    pairs = list(zip(ours.read_text().splitlines(), theirs.read_text().splitlines(), strict=True))
    worst = 0.0
    for line, other in pairs:
        left, right = (json.loads(text)["log_likelihoods"] for text in (line, other))
        worst = max([worst, *(abs(a - b) / abs(b) for a, b in zip(left, right, strict=True))])
    agree = bool(pairs) and worst <= TOLERANCE
    print(f"{'passed' if agree else 'failed'}: {len(pairs)} questions, largest relative difference {worst:.2e}")
    return 0 if agree else 1


if __name__ == "__main__":
    if sys.argv[1] == "--compare":
        sys.exit(compare(Path(sys.argv[2]), Path(sys.argv[3])))
    make(Path(sys.argv[1]))
