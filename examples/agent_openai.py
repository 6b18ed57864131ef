"""An agent with the openai package: it looks up a hidden digit with a tool, then names it in two branches.

Write its tasks and some chats to begin with, then train it (pip install openai):

python examples/agent_openai.py
spear train --help

The trainer serves the policy at `base_url`. The function returns the reward; every call trains.
"""

import json
import random
from typing import Any

from openai import OpenAI

DIGITS = "0123"
QUESTION = "Which digit is hidden ?"
LOOK: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def solve(task: Any, base_url: str, api_key: str) -> float:
    """1 if the policy names the digit in both branches."""
    client = OpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": task.data["question"]}]
    first = client.chat.completions.create(model="policy", messages=messages, tools=[LOOK]).choices[0].message
    messages.append(first)
    for call in first.tool_calls or []:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": task.data["digit"]})
    answers = []
    for question in ("Name it .", "Say it ."):
        branch = [*messages, {"role": "user", "content": question}]
        said = client.chat.completions.create(model="policy", messages=branch, tools=[LOOK]).choices[0].message
        answers.append((said.content or "").strip())
    return float(answers == [task.data["digit"]] * 2)


def chat(digit: str, question: str, *, looks: bool) -> dict[str, Any]:
    """A chat to learn the format from: one that looks, or one that does not."""
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    first: dict[str, Any] = {"role": "assistant", "content": "I know it"}
    if looks:
        first = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = [{"role": "tool", "tool_call_id": "1", "content": digit}] if looks else []
    ending = [{"role": "user", "content": question}, {"role": "assistant", "content": digit if looks else "unknown"}]
    return {"messages": [{"role": "user", "content": QUESTION}, first, *result, *ending], "tools": [LOOK]}


def main() -> None:
    rng = random.Random(0)
    with open("tasks.jsonl", "w") as file:
        for number in range(128):
            split = "train" if number < 64 else "validation"
            row = {"id": f"{number:03d}", "split": split, "question": QUESTION, "digit": rng.choice(DIGITS)}
            file.write(json.dumps(row) + "\n")
    with open("chats.jsonl", "w") as file:
        for _ in range(800):
            digit, question = rng.choice(DIGITS), rng.choice(("Name it .", "Say it ."))
            file.write(json.dumps(chat(digit, question, looks=rng.random() < 0.4)) + "\n")


if __name__ == "__main__":
    main()
