"""A document of about 3,000 tokens, made by rule, and questions about it."""

_TOWNS = ("Arvik", "Belden", "Corro", "Dunmar", "Elst", "Fenwick", "Gorlo", "Hasken", "Ilmen", "Jorvast")
_THINGS = ("a red ferry", "a stone mill", "a glass tower", "an old theatre", "a salt market", "a tram line")


def document(seed: int = 0, sentences: int = 119) -> str:
    """Sentences about towns; another seed is another text from its first words on."""
    lines = [f"Report number {seed + 1} of the coast survey."]
    for i in range(sentences):
        town, thing = _TOWNS[(i * 7 + seed) % 10], _THINGS[(i * 5 + seed) % 6]
        lines.append(
            f"In the year {1700 + i * 2 + seed} the town of {town} opened {thing}, which {i * 13 % 89 + 4} men built."
        )
    return " ".join(lines)


QUESTIONS = [f"What did the town of {town} open?" for town in _TOWNS]


def prompt(question: str, seed: int = 0, sentences: int = 119) -> str:
    """The document, then the question."""
    return f"{document(seed, sentences)}\n\nQuestion: {question}\nAnswer:"
