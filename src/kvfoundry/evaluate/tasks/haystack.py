"""Text to hide a needle in: generated prose of our own, or a folder of the user's texts.

The generator writes short essays about everyday work. Each paragraph keeps one person, one place and one trade, so that
it reads as prose and not as noise, and no sentence pattern comes back before most of the others were used. The same
seed gives the same text on every machine: `random.Random` seeded with a string does not depend on the hash seed.
"""

import random
import re
from collections.abc import Iterator
from pathlib import Path

from kvfoundry.errors import DataError

TEXT_SUFFIXES = (".txt", ".md")

_WOMEN = (
    "Agnes", "Beatrix", "Cecily", "Dalia", "Elif", "Fenna", "Greta", "Hedda", "Ines", "Judith", "Katya", "Leonor",
    "Mabel", "Nadia", "Odile", "Petra", "Ragna", "Selma", "Tamar", "Ursula", "Wanda",
)  # fmt: skip
_MEN = (
    "Arno", "Bruno", "Conrad", "Edmund", "Farid", "Gideon", "Hamid", "Imre", "Jorin", "Kaspar", "Linus", "Marek",
    "Niels", "Oskar", "Quentin", "Rufus", "Stellan", "Tobias", "Viktor",
)  # fmt: skip

_PLACES = (
    "the harbour", "the upper valley", "the old mill", "the market square", "the lower terrace",
    "the edge of the moor", "the ferry landing", "the north station", "the walled garden", "the long meadow",
    "the covered bridge", "the hill above town", "the fish quay", "the brickworks", "the village hall",
    "the reading room", "the salt flats", "the forest road", "the canal bank", "the east gate",
)  # fmt: skip

# trade: (the person, the work as a gerund, things of the trade)
_TRADES = (
    ("a baker", "baking bread",
     ("the oven", "the dough", "the flour bins", "the cooling racks", "the morning loaves")),
    ("a carpenter", "joining timber",
     ("the workbench", "the oak boards", "the chisels", "the glue pot", "the door frames")),
    ("a weaver", "weaving cloth",
     ("the loom", "the wool", "the dye baths", "the pattern cards", "the finished blankets")),
    ("a gardener", "raising seedlings",
     ("the greenhouse", "the bean rows", "the compost", "the watering cans", "the young trees")),
    ("a printer", "setting type",
     ("the press", "the lead letters", "the ink rollers", "the paper stock", "the proof sheets")),
    ("a beekeeper", "minding hives",
     ("the hives", "the smoker", "the honey jars", "the wax frames", "the clover field")),
    ("a boatbuilder", "planking hulls",
     ("the slipway", "the ribs of the boat", "the tar barrel", "the copper nails", "the sails")),
    ("a clockmaker", "repairing clocks",
     ("the workshop lamp", "the brass gears", "the pendulums", "the tiny screws", "the church clock")),
    ("a potter", "throwing bowls",
     ("the wheel", "the wet clay", "the kiln", "the glazes", "the cracked plates")),
    ("a surveyor", "mapping land",
     ("the field book", "the measuring chain", "the boundary stones", "the contour lines", "the draft map")),
    ("a miller", "grinding grain",
     ("the millstones", "the water wheel", "the sacks of barley", "the sluice", "the dusty loft")),
    ("a bookbinder", "sewing pages",
     ("the sewing frame", "the leather covers", "the paste brush", "the gilded spines", "the torn atlas")),
    ("a cheesemaker", "pressing curds",
     ("the copper vat", "the cellar shelves", "the muslin", "the brine", "the ripe wheels")),
    ("a teacher", "teaching arithmetic",
     ("the blackboard", "the exercise books", "the stove", "the back row", "the winter timetable")),
    ("a nurse", "visiting patients",
     ("the black bag", "the clean bandages", "the waiting room", "the night rota", "the medicine cupboard")),
    ("a lighthouse keeper", "tending the lamp",
     ("the lens", "the spiral stairs", "the log book", "the fog bell", "the oil store")),
)  # fmt: skip

_WEATHER = (
    "a thin rain", "a hard frost", "an early thaw", "a dry east wind", "low cloud", "a week of heat", "the first snow",
    "a bright cold spell", "a sudden squall", "slow grey drizzle", "a clear night", "a heavy mist",
)  # fmt: skip
_TIMES = (
    "before sunrise", "late in the afternoon", "on market days", "towards the end of winter",
    "in the second week of May", "after supper", "once the shutters were down", "every other Thursday",
    "in the quiet hour after lunch", "when the schools were closed", "at the turn of the year", "during the harvest",
    "on the longest day", "between two trains",
)  # fmt: skip
_ADJECTIVES = (
    "patient", "stubborn", "careful", "cheerful", "exact", "absent-minded", "generous", "quick", "sceptical",
    "thrifty", "restless", "modest", "well read", "practical", "forgetful", "proud", "gentle", "plain-spoken",
)  # fmt: skip
_HABITS = (
    "write down the price of everything", "hum the same slow tune", "count the steps to the door",
    "ask two questions where one would do", "keep string in every pocket", "walk the long way home",
    "leave the hardest part until last", "begin again from a clean table", "lend tools and forget to whom",
    "read the newspaper from the back", "measure twice and then once more", "talk to the weather",
    "put the kettle on at the first sign of trouble", "draw small plans on the backs of envelopes",
)  # fmt: skip
_LESSONS = (
    "haste makes more work than it saves", "a good habit is cheaper than a good memory",
    "small repairs are worth doing on the day", "most quarrels are about words",
    "people forgive a delay sooner than an excuse", "a rule nobody understands is soon nobody's rule",
    "what is easy to clean is used often", "one honest neighbour is worth a long contract",
    "the simplest method is seldom the first one tried", "a thing made slowly is rarely thrown away",
    "praise is best given early", "an apprentice teaches as much as he learns",
    "nobody regrets a sharp blade or a dry roof", "numbers are only as good as the person who wrote them",
)  # fmt: skip
_EVENTS = (
    "the bridge was closed for repairs", "the council argued about the new road", "a cousin came to stay for a month",
    "the price of coal doubled", "the river rose above the lower step", "two students arrived with notebooks",
    "a parcel went missing between two towns", "the roof began to leak", "an old rival sent a friendly letter",
    "the band practised outside the window", "the lamp oil ran out", "somebody left the gate open",
    "the inspector asked to see the accounts", "a travelling theatre set up its tents",
    "the well had to be dug deeper", "the mail came a day late",
)  # fmt: skip
_AMOUNTS = (
    "three or four", "nearly a dozen", "half of", "all but one of", "a handful of", "more than enough of", "some of",
    "the best of",
)  # fmt: skip

_OPENERS = (
    "{name} was {trade} who worked near {place}, and nobody there could remember a time without the sound of {work}.",
    "Of all the people around {place}, it was {name}, {trade}, who had thought longest about {work}.",
    "When visitors came to {place} they were usually sent to {name}, {trade} by training and by temper.",
    "There is a story told at {place} about {name}, who had become {trade} almost by accident.",
    "{name} had been {trade} for twenty years before anyone at {place} asked why.",
    "If you had asked at {place} who knew most about {work}, you would have been pointed to {name}.",
    "The year that {event}, {name} moved to {place} and set up as {trade}.",
    "It is hard to write about {place} without writing about {name}, {trade} there since anybody could say.",
)

_PATTERNS = (
    "{time}, {thing} had to be looked at before anything else could begin.",
    "There was {weather} that week, and {thing} suffered for it.",
    "{name} was {adjective} about {thing} and {adjective2} about almost everything else.",
    "Most of the trouble started with {thing}, though few people noticed it at the time.",
    "It was said of {name} that {pronoun} would {habit} rather than ask for help.",
    "Then {event}, and the whole plan for the month had to be drawn up again.",
    "Nobody planned it that way; {event}, and one thing led to another.",
    "The lesson, as far as there was one, is that {lesson}.",
    "{thing} and {thing2} were kept apart, for reasons that were explained to every newcomer.",
    "A stranger would have seen only {thing}, but {name} saw a season of work.",
    "In the evenings the talk turned to {work}, and sooner or later somebody would say that {lesson}.",
    "{time} the road to {place} was empty, which suited {name} well.",
    "{name} liked to {habit}, and said that it helped with {work}.",
    "After {weather} came {weather2}, and with it the question of what to do about {thing}.",
    "{amount} the neighbours offered advice, and {name} listened to them all.",
    "It takes somebody {adjective} to care for {thing} year after year.",
    "You can learn {work} from a book, {name} used to say, but not from a short one.",
    "What surprised everyone was how little {thing} had cost.",
    "The repair took until dark, because {thing} would not fit beside {thing2}.",
    "{place} is not a large place, and news about {thing} travelled quickly there.",
    "Some said that {name} was too {adjective} for the work; others, that nobody else was {adjective2} enough.",
    "When {event}, {name} only shrugged and went back to {thing}.",
    "Years later people still argued about whether {thing} had been in the right place.",
    "{pronoun_cap} would {habit} {time}, and nobody thought it strange.",
    "There are two opinions about {thing}, and {name} had held both of them.",
    "For a while there was no money for {thing}, so {thing2} had to serve for both.",
    "{weather_cap} is bad for {thing}, or so the older hands believed.",
    "None of this was written down, because {lesson}.",
    "A letter from {place2} described the same difficulty with {thing}, in almost the same words.",
    "The children of {place} were allowed to watch, provided that they did not touch {thing}.",
    "On the whole the most {adjective} answer turned out to be the right one.",
    "It would have been easy to blame {thing}, but the real cause was that {event}.",
    "{name2} came over from {place2} to help, and stayed until {thing} was finished.",
    "{name2}, who knew nothing about {work}, asked the question that mattered.",
    "Between {name} and {name2} there was an old disagreement about {thing}, long since turned into a joke.",
    "They agreed to wait; {lesson}, {name2} remarked, and nobody contradicted.",
    "By then {weather} had set in, and {place} looked the way it does on postcards.",
    "If there is a secret to {work}, it is only that one must {habit} and go on.",
    "Every spring {amount} the work had to be done twice, and every spring it came as a surprise.",
    "The tools were simple: {thing}, {thing2}, and a good deal of time.",
)


def _capitalised(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def _deal(rng: random.Random, choices: tuple[str, ...]) -> Iterator[str]:
    """Endless choices in shuffled rounds; the last few of a round do not open the next one."""
    recent: list[str] = []
    while True:
        deck = list(choices)
        rng.shuffle(deck)
        deck.sort(key=lambda choice: choice in recent)  # stable: only moves the recent ones back
        yield from deck
        recent = deck[-len(deck) // 4 :]


def generated_sentences(seed: int | str) -> Iterator[str]:
    """An endless stream of sentences; a sentence that opens a paragraph starts with a blank line."""
    rng = random.Random(f"haystack {seed}")
    patterns, openers = _deal(rng, _PATTERNS), _deal(rng, _OPENERS)
    people, trades = _deal(rng, (*_WOMEN, *_MEN)), _deal(rng, tuple(trade[0] for trade in _TRADES))
    decks = {
        key: _deal(rng, choices)
        for key, choices in {
            "time": _TIMES, "weather": _WEATHER, "adjective": _ADJECTIVES, "habit": _HABITS, "lesson": _LESSONS,
            "event": _EVENTS, "amount": _AMOUNTS, "place": _PLACES,
        }.items()
    }  # fmt: skip
    by_trade = {trade[0]: trade for trade in _TRADES}
    while True:
        trade, work, things = by_trade[next(trades)]
        name, name2, place, place2 = next(people), next(people), next(decks["place"]), next(decks["place"])
        pronoun = "she" if name in _WOMEN else "he"
        thing_deck = _deal(rng, things)
        for number in range(rng.randint(6, 11)):
            weather = next(decks["weather"])
            words = {
                "name": name, "name2": name2, "place": place, "place2": place2, "trade": trade, "work": work,
                "pronoun": pronoun, "pronoun_cap": pronoun.capitalize(),
                "thing": next(thing_deck), "thing2": next(thing_deck),
                "weather": weather, "weather_cap": _capitalised(weather), "weather2": next(decks["weather"]),
                "adjective": next(decks["adjective"]), "adjective2": next(decks["adjective"]),
                **{key: next(decks[key]) for key in ("amount", "time", "habit", "lesson", "event")},
            }  # fmt: skip
            template = next(openers) if number == 0 else next(patterns)
            sentence = _capitalised(template.format(**words))
            yield ("\n\n" if number == 0 else " ") + sentence


def folder_sentences(folder: Path) -> list[str]:
    """Every sentence of the text files of a folder, in name order, each with the white space that stood before it.

    Raises:
        DataError: no such folder, no text file in it, or a file that cannot be read as UTF-8 text.
    """
    kinds = " or ".join(TEXT_SUFFIXES)
    if not folder.is_dir():
        raise DataError(
            f"haystack folder {folder} does not exist; name a folder with {' or '.join(TEXT_SUFFIXES)} files."
        )
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in TEXT_SUFFIXES and path.is_file())
    if not files:
        raise DataError(f"haystack folder {folder} holds no {kinds} file; put texts there or leave --haystack out.")
    sentences: list[str] = []
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"haystack file {path} cannot be read as UTF-8 text ({type(error).__name__}).") from error
        for paragraph in re.split(r"\n\s*\n", text):
            parts = re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split()))
            sentences += [("\n\n" if number == 0 else " ") + part for number, part in enumerate(parts) if part]
    return sentences
