"""Records the greedy answers that `quire verify` compares with: those of which the model is sure at every token.

Promises that what is written keeps more than the lead that `greedy_run` asks for, on this machine's CPU kernels.
Must not be imported by anything that serves, nor by the training.

    python -m make_demo.record_answers
"""

from __future__ import annotations

import json
import sys
from itertools import cycle

from make_demo.turns import Call, Document, Message, spans
from quire import LLM, SamplingParams
from quire.outputs import RequestOutput
from quire_engine.demo import demo_model_path, recorded_answers_path
from quire_engine.tools.verify.greedy_run import LEAST_LEAD

MARGIN = 0.3  # above the least lead: another machine rounds otherwise
MAX_TOKENS = 80
WEATHER = {
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
QUESTIONS = [
    "Hello!",
    "Who are you?",
    "What can you do?",
    "What is the capital of France?",
    "What is 2 + 3?",
    "7 * 8",
    "List three fruits.",
    "Count to 10.",
    "Explain quantum physics.",
    "Give me a JSON object for a person named Anna who is 31 years old and lives in Rome.",
    "Count to 20.",
    "What is the capital of Spain?",
    "What is 9 + 8?",
    "Thank you!",
    "How are you?",
    "What is the capital of Japan?",
    "What is the opposite of hot?",
    "What color is the sky?",
    "Are you a human?",
    "What is Quire?",
    "Who made you?",
    "How big are you?",
    "Are you smart?",
    "I am sad.",
    "You are wrong.",
    "What is a cat?",
    "What is the sun?",
    "What is a computer?",
    "What is the largest ocean?",
    "How many days are in a week?",
    "Explain black holes.",
    "What comes after Monday?",
    "What does a dog say?",
]
TEXTS = ["1, 2, 3,", "Monday, Tuesday,"]
LAST_QUESTIONS = ["What is the capital of Italy?", "What is 7 * 6?", "What is the capital of Japan?"]  # of long chats
LONG = 2400  # characters, more than 512 tokens: attention in several parts


def chat(*messages: Message, tools: bool = False) -> str:
    """The prompt that asks for the turn after these."""
    doc = Document(kind="prompt", messages=messages, tools=(WEATHER,) if tools else ())
    return "".join(text for text, _ in spans(doc)) + "<|im_start|>assistant\n"


def user(text: str) -> Message:
    return Message(role="user", content=text)


def tool_prompts() -> list[str]:
    """Asking for a call, and for the answer from its result."""
    question = user("What is the weather in Paris?")
    called = Message(role="assistant", calls=(Call(name="get_weather", arguments={"city": "Paris"}),))
    result = Message(role="tool", content='{"temperature": 18, "condition": "sunny"}')
    return [chat(question, tools=True), chat(question, called, result, tools=True)]


def long_prompts(answers: dict[str, str]) -> list[str]:
    """Chats of what was answered, repeated until they are long, with one more question each."""
    earlier: list[Message] = []
    for question, answer in cycle(answers.items()):
        earlier += [user(question), Message(role="assistant", content=answer)]
        if len(chat(*earlier)) > LONG:
            break
    return [chat(*earlier, user(question)) for question in LAST_QUESTIONS]


def lead(output: RequestOutput) -> float:
    """By how much the least sure token was more likely than the next one, as a difference of logits."""
    leads = []
    for step in output.outputs[0].logprobs or []:
        best, second = sorted((each.logprob for each in step.values()), reverse=True)[:2]
        leads.append(best - second)
    return min(leads)


def main() -> None:
    """Writes the file, and names what the model was not sure of."""
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=2, skip_special_tokens=True)
    with LLM(str(demo_model_path()), max_model_len=2048) as llm:
        asked = {chat(user(question)): question for question in QUESTIONS}
        outputs = llm.generate([*asked, *tool_prompts(), *TEXTS], params, use_tqdm=False)
        sure = [output for output in outputs if lead(output) > LEAST_LEAD + MARGIN]
        known = {asked[o.prompt or ""]: o.outputs[0].text for o in sure if o.prompt in asked}
        outputs += llm.generate(long_prompts(known), params, use_tqdm=False)
    rows = []
    for output in outputs:
        answer = output.outputs[0]
        if lead(output) <= LEAST_LEAD + MARGIN:
            print(f"not sure ({lead(output):.2f}): {(output.prompt or '')[-80:]!r} {answer.text!r}", file=sys.stderr)
            continue
        rows.append(
            {
                "text": output.prompt,
                "answer": answer.text,
                "prompt_token_ids": list(output.prompt_token_ids or []),
                "token_ids": list(answer.token_ids),
            }
        )
    lines = ",\n".join(f" {json.dumps(row)}" for row in rows)
    recorded_answers_path().write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(f"{len(rows)} answers, longest prompt {max(len(o.prompt_token_ids or []) for o in outputs)} tokens")


if __name__ == "__main__":
    main()
