"""Measure needle wordings: how often does the full cache of a model answer them at about 2k tokens?

    python benchmarks/needle_wordings.py --model FOLDER --out benchmarks/results/needle_wordings.json

Plain transformers, greedy, no cache method. It chooses the wordings of the needle task, whose premise is that the full
cache finds nearly every needle, so that what a method loses is the method's doing. The kinds that the task offers are
measured beside wordings that were tried and left.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import torch
import transformers

from kvfoundry.evaluate.prompts import encode_prompt
from kvfoundry.evaluate.tasks.needles import KINDS, NeedleKind
from kvfoundry.evaluate.tasks.niah import FRAME, NeedleTask

ANIMALS = KINDS["word"].answers
OBJECTS = ("violin", "diamond", "tornado", "pyramid", "volcano", "galaxy", "rocket", "piano", "umbrella", "tiger")


def tried(sentence: str, question: str, answers: tuple[str, ...] | None) -> NeedleKind:
    return NeedleKind(summary="tried", sentence=sentence, question=question, question_many=question, answers=answers)


TRIED = {
    "phrase, on Sundays": dataclasses.replace(
        KINDS["phrase"],
        sentence="Remember this: the mayor of {key} likes to {answer} on Sundays.",
        question="What does the mayor of {key} like to do on Sundays?",
    ),
    "word, code word": tried(
        "Remember this: the code word of {key} is {answer}.", "What is the code word of {key}?", OBJECTS
    ),
    "word, favourite animal": tried(
        "Remember this: the favourite animal of the mayor of {key} is the {answer}.",
        "What is the favourite animal of the mayor of {key}?",
        ANIMALS,
    ),
    "word, magic word": tried("The magic word is {answer}.", "What is the magic word?", OBJECTS),
    "word, secret code word": tried(
        "The secret code word of {key} is {answer}.", "What is the secret code word of {key}?", OBJECTS
    ),
    "word, symbol": tried(
        "The official symbol of {key} is the {answer}.", "What is the official symbol of {key}?", OBJECTS
    ),
    "word, said twice": tried(
        "The pass word of {key} is {answer}. Remember it. {answer} is the pass word of {key}.",
        "What is the pass word of {key}?",
        OBJECTS,
    ),
    "phrase, not announced": dataclasses.replace(
        KINDS["phrase"], sentence="The best thing to do in {key} is to {answer}."
    ),
    "digits, telephone": tried(
        "The telephone number of the {key} embassy is {answer}.",
        "What is the telephone number of the {key} embassy?",
        None,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a local folder that transformers can load")
    parser.add_argument("--kind", action="append", help=f"of {', '.join([*KINDS, *TRIED])}; all by default")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=2, help="items at each of ten depths")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    chosen = arguments.kind or [*KINDS, *TRIED]
    offered = set(KINDS)
    KINDS.update(TRIED)
    outcome = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for name in chosen:
        depths = tuple(round(100 * step / 9, 1) for step in range(10))
        task = NeedleTask(lengths=(arguments.length,), depths=depths, kind=name, repeats=arguments.repeats)
        scores, exacts, missed, began = [], [], [], time.perf_counter()
        for item in task.items(tokenizer, chat=True, seed=arguments.seed):
            ids = torch.tensor([encode_prompt(tokenizer, item.prompt, chat=True)])
            with torch.no_grad():
                output = model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=item.max_new_tokens, do_sample=False,
                    pad_token_id=tokenizer.pad_token_id,
                )  # fmt: skip
            prediction = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
            score, exact = task.score(item, prediction)
            scores.append(score)
            exacts.append(exact)
            if not exact:
                missed.append({"depth": item.cell["depth"], "references": item.references, "prediction": prediction})
        outcome[name] = {
            "offered": name in offered,
            "sentence": KINDS[name].sentence,
            "question": KINDS[name].question,
            "frame": FRAME,
            "length": arguments.length,
            "seed": arguments.seed,
            "items": len(scores),
            "exact": round(sum(exacts) / len(exacts), 4),
            "graded": round(sum(scores) / len(scores), 4),
            "missed": missed,
        }
        arguments.out.write_text(json.dumps(outcome, indent=1) + "\n")
        seconds = (time.perf_counter() - began) / len(scores)
        print(
            f"{name:24} exact {outcome[name]['exact']:.2f} graded {outcome[name]['graded']:.2f} {seconds:.1f} s/item",
            flush=True,
        )
        for miss in missed[:3]:
            print(f"    {miss['depth']:5} {miss['references'][0]} | {miss['prediction'][:90]!r}", flush=True)


if __name__ == "__main__":
    main()
