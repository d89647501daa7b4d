"""The text around what matters: the same few sentences over and over, or the beginning of an essay."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

from kvfoundry.evaluate.tasks.ruler.base import Filler, Setting

NOISE = (
    "The clouds drift to the east.", "A kettle hums on the stove.", "Two boats rest in the bay.",
    "Nobody is in a hurry.", "And so the day goes on.",
)  # fmt: skip
# Rounded even spacing of 0 to 100, at 40 places.
DEPTHS = tuple(round(100 * step / 39) for step in range(40))


class Essay:
    """A long text, read sentence by sentence as far as it is needed; its first so many words are the haystack."""

    def __init__(self, sentences: Iterable[str]) -> None:
        self._source = iter(sentences)
        self._sentences: list[str] = []
        self._ends: list[int] = []

    def available(self, words: int) -> int:
        """How many words there are, `words` at most."""
        while (total := self._ends[-1] if self._ends else 0) < words:
            sentence = next(self._source, None)
            if sentence is None:
                return total
            parts = sentence.split()
            self._sentences.append(" ".join(parts))
            self._ends.append(total + len(parts))
        return words

    def sentences(self, words: int) -> list[str]:
        """The first `words` words, cut into sentences; the last one may be cut short."""
        words = self.available(words)
        whole = bisect_left(self._ends, words)
        begun = words - (self._ends[whole - 1] if whole else 0)
        return [*self._sentences[:whole], " ".join(self._sentences[whole].split()[:begun])]

    def holds(self, text: str, words: int) -> bool:
        """Whether one of the first `words` words' sentences has this text in it."""
        self.available(words)
        return any(text in sentence for sentence in self._sentences)


def noise_lines(sentences: int) -> list[str]:
    """The five sentences of `NOISE` once a line, until there are so many sentences; the last line may be shorter."""
    whole, rest = divmod(sentences, len(NOISE))
    return [" ".join(NOISE)] * whole + ([" ".join(NOISE[:rest])] if rest else [])


def in_essay(facts: Sequence[str], essay: Essay, setting: Setting) -> Filler:
    """Facts in the beginning of an essay.

    Their depths are drawn from `DEPTHS` without replacement; each stands in front of the sentence that begins there.
    """
    depths = sorted(setting.rng("depths").sample(DEPTHS, len(facts)))

    def context(words: int) -> str:
        sentences = essay.sentences(words)
        places = [len(sentences) * depth // 100 for depth in depths]
        for place, fact in zip(reversed(places), reversed(facts), strict=True):
            sentences.insert(place, fact)
        return " ".join(sentences)

    return Filler(context, smallest=1, most=essay.available(setting.length), unit="words")


def in_lines(facts: Sequence[str], lines: Callable[[int], list[str]], setting: Setting) -> Filler:
    """Facts in their order, each in front of another random line of a text made of lines."""

    def context(size: int) -> str:
        text = lines(size)
        places = sorted(setting.rng("places").sample(range(len(text)), len(facts)))
        for place, fact in zip(reversed(places), reversed(facts), strict=True):
            text.insert(place, fact)
        return "\n".join(text)

    return Filler(context, smallest=len(facts), most=setting.length, unit="lines")


def in_noise(facts: Sequence[str], setting: Setting) -> Filler:
    """Facts in their order, each in front of another random line of noise."""
    filler = in_lines(facts, noise_lines, setting)
    return Filler(filler.context, (len(facts) - 1) * len(NOISE) + 1, setting.length, "sentences")
