"""Measure needle wordings: how often does the full cache of a model answer them at about 2k tokens?

    python benchmarks/needle_wordings.py --model FOLDER --items 20 --out benchmarks/results/needle_wordings.json

Plain transformers, greedy, no cache method: this chooses the wordings of the needle task, whose premise is that the
full cache finds nearly all needles, so that what a method loses is the method's doing.
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvfoundry.evaluate.metrics import contains_answer, recovered_share
from kvfoundry.evaluate.tasks.haystack import generated_sentences

FRUIT = ["mango", "papaya", "cherry", "walnut", "pumpkin", "ginger", "lemon", "coconut"]
ANIMALS = ["elephant", "penguin", "tiger", "dolphin", "parrot", "camel", "rabbit", "giraffe", "turtle", "monkey", "zebra", "kangaroo"]
WORDS = ["elephant", "violin", "diamond", "tornado", "pyramid", "volcano", "galaxy", "penguin", "rocket", "tiger", "piano", "umbrella"]
CITIES = ["Lisbon", "Cairo", "Oslo", "Nairobi", "Lima", "Kyoto", "Toronto", "Mumbai", "Athens", "Havana"]
PHRASES = [
    "eat a fresh mango on the roof of the museum", "ride a red tram to the top of the castle", "listen to jazz in the basement of the library",
    "feed the penguins at the old aquarium", "drink mint tea beside the blue fountain", "watch the sunset from the glass tower",
    "rent a yellow bicycle and ride to the zoo", "dance in the street during the lantern festival",
]  # fmt: skip


def digits(rng: random.Random) -> str:
    return str(rng.randint(10**6, 10**7 - 1))


# name: (needle, question, how the answer is drawn)
WORDINGS = {
    "word/secret code word": ("The secret code word of {key} is {answer}.", "What is the secret code word of {key}? Answer with one word.", WORDS),
    "word/magic word": ("The magic word is {answer}.", "What is the magic word?", WORDS),
    "word/special magic word for": ("One of the special magic words for {key} is: {answer}.", "What is the special magic word for {key} mentioned in the text?", WORDS),
    "word/symbol of city": ("The official symbol of the city of {key} is the {answer}.", "What is the official symbol of the city of {key}?", WORDS),
    "word/pass word twice": ("The pass word of {key} is {answer}. Remember it. {answer} is the pass word of {key}.", "What is the pass word of {key}?", WORDS),
    "word/code word remember": ("Remember this: the code word of {key} is {answer}.", "What is the code word of {key}?", WORDS),
    "word/uncle keeps": ("My uncle in {key} keeps a {answer} in his bedroom.", "What does my uncle in {key} keep in his bedroom?", WORDS),
    "word/museum stolen": ("Last night a thief stole a {answer} from the museum of {key}.", "What did a thief steal from the museum of {key}?", WORDS),
    "word/favourite animal": ("The favourite animal of the mayor of {key} is the {answer}.", "What is the favourite animal of the mayor of {key}?", ANIMALS),
    "phrase/best thing": ("The best thing to do in {key} is to {answer}.", "What is the best thing to do in {key}?", PHRASES),
    "digits/magic number": ("One of the special magic numbers for {key} is: {answer}.", "What is the special magic number for {key} mentioned in the text?", digits),
    "digits/pass key": ("The pass key is {answer}. Remember it. {answer} is the pass key.", "What is the pass key?", digits),
    "digits/phone number": ("The telephone number of the {key} embassy is {answer}.", "What is the telephone number of the {key} embassy?", digits),
}  # fmt: skip
FRAMES = {
    "plain": "{context}\n\n{question}",
    "use text": "Read the following text and answer the question at the end.\n\n{context}\n\nQuestion: {question}",
    "ask first": "Read the text below and find the answer to this question: {question}\n\n{context}\n\nQuestion: {question}",
}


def build(tokenizer, wording: str, frame: str, item: int, length: int) -> tuple[str, str]:
    needle, question, answers = WORDINGS[wording]
    rng = random.Random(f"{wording} {item}")
    key = rng.choice(CITIES)
    answer = answers(rng) if callable(answers) else rng.choice(answers)
    sentences, used = [], 120
    for sentence in generated_sentences(item):
        used += len(tokenizer(sentence, add_special_tokens=False).input_ids)
        if used > length:
            break
        sentences.append(sentence)
    sentences.insert(round(len(sentences) * (item % 10) / 9), " " + needle.format(key=key, answer=answer))
    text = FRAMES[frame].format(context="".join(sentences).strip(), question=question.format(key=key))
    return text, answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a local folder that transformers can load")
    parser.add_argument("--items", type=int, default=20)
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument("--wording", action="append", help="only wordings whose name contains this")
    parser.add_argument("--frame", action="append", help=f"of {', '.join(FRAMES)}")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    outcome = json.loads(arguments.out.read_text()) if arguments.out and arguments.out.exists() else {}
    for wording in WORDINGS:
        if arguments.wording and not any(part in wording for part in arguments.wording):
            continue
        for frame in arguments.frame or FRAMES:
            exact, graded, wrong, began = [], [], [], time.perf_counter()
            for item in range(arguments.items):
                text, answer = build(tokenizer, wording, frame, item, arguments.length)
                inputs = tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
                )
                with torch.no_grad():
                    ids = model.generate(**inputs, max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.pad_token_id)
                prediction = tokenizer.decode(ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
                exact.append(contains_answer(answer, prediction))
                graded.append(recovered_share(answer, prediction))
                if not exact[-1]:
                    wrong.append({"item": item, "answer": answer, "prediction": prediction})
            row = {
                "needle": WORDINGS[wording][0], "question": WORDINGS[wording][1], "frame": FRAMES[frame], "items": arguments.items,
                "length": arguments.length, "exact": sum(exact) / len(exact), "graded": round(sum(graded) / len(graded), 4), "wrong": wrong,
            }  # fmt: skip
            outcome[f"{wording} / {frame}"] = row
            seconds = (time.perf_counter() - began) / arguments.items
            print(f"{wording:32} {frame:10} exact {row['exact']:.2f} graded {row['graded']:.2f} {seconds:.1f} s", flush=True)
            for miss in wrong[:3]:
                print("     ", miss["item"], miss["answer"], "|", miss["prediction"][:90].replace("\n", " "), flush=True)
            if arguments.out:
                arguments.out.write_text(json.dumps(outcome, indent=1) + "\n")


if __name__ == "__main__":
    main()
