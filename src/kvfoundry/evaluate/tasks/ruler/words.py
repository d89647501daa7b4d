"""What the tasks hide and count: keys of two words, numbers, identifiers, variable names, coded words, plain words."""

import random
import string
import uuid

from kvfoundry.evaluate.tasks.base import TaskError


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ADJECTIVES = _words("""
    able aged agile alert amber ample ancient arctic ashen autumn avid azure balmy bare basic beige blank bleak
    blond blue bold bony brave brief bright brisk broad bronze brown bulky busy calm candid casual cheap cheery
    chilly chosen civic civil clean clear clever close cloudy coarse coastal cobalt cold comic common cool copper
    coral cosmic cosy crimson crisp curious curly damp daring dark dear deep dense dim distant double dry dull dusty
    eager early earnest east easy elder elegant empty equal exact fair faint famous fancy fast fertile fiery final
    fine firm first fit flat fleet floral fluffy foggy fond formal fragile frank free fresh frosty frugal full funny
    gentle giant gilded glad glossy golden grand grassy grave gray great green gritty hardy harsh hasty hazel hazy
    heavy hidden high hollow honest humble humid icy ideal idle indigo inner ivory jolly joyful just keen kind large
    late lavish lazy level light linen liquid little lively local lofty lone long loose loud loyal lucky lunar
    magenta main major mellow merry mild minor misty modern modest mossy mute narrow native navy neat new nimble
    noble north novel oblong odd olive open orange ornate outer oval pale partial patient plain pleasant polar
    polite prime private prompt proper proud public pure purple quaint quick quiet rapid rare raw ready red remote
    rich rigid ripe robust rosy rough round royal rugged rural rusty sacred sandy scarlet secret serene shady
    shallow sharp shiny short shy silent silky silver simple sleek slender slim slow small smart smooth snowy sober
    soft solar solid sonic south sparse special spicy stable stark steady steep sterile stiff still stony stout
    strict strong sturdy subtle sudden sunny super sweet swift tall tame tender tense thick thin tidy tiny tough
    tropic true typical unique upper urban usual vacant vague valid vast velvet violet vital vivid warm wary wavy
    west wet white whole wide wild windy winter wise witty wooden woolly young zesty
""")
NOUNS = _words("""
    acorn actor alley almond anchor ankle anvil apple apron arch arena armor arrow atlas attic badge bagel baker
    balcony ballad bamboo banjo banner barley barn barrel basin basket beach beacon beaver bell bench berry birch
    biscuit blanket blossom boat bonnet border bottle boulder bowl bracket branch brass bread breeze brick bridge
    broom brush bucket buckle buffalo bugle button cabin cable cactus camera canal candle canoe canvas canyon
    captain caravan carpet carrot cart castle cattle cave cedar cellar cello chain chair chalk chapel cherry chess
    chimney cider cinema circle cliff clinic cloak clock cloud clover coach cobbler coconut coffee collar column
    comet compass copse cottage cotton cradle crane crater creek cricket crown crystal cup curtain cushion cymbal
    daisy dancer deck desert desk diary diner ditch dock dome donkey door dragon drawer dress drum dune eagle easel
    echo editor elbow ember engine envelope estate fabric factory falcon farmer feather fence fern ferry fiddle
    field finch flag flame flask flint flour flute forest fork fortress fossil fountain fox frame freight frog
    galaxy gallery garage garden garlic gate gazelle ginger glacier glass globe glove goat goose grain granite grape
    gravel grove guitar gull hammer hammock harbor harp harvest hat hawk heather hedge helmet heron hill hinge holly
    honey hoof hornet horse hotel hound igloo inlet insect iris iron island ivy jacket jaguar jar jasmine jewel
    jigsaw judge jungle kayak kennel kettle key kitchen kite kitten knight ladder lagoon lake lamp lantern lawn leaf
    lemon lens letter lichen lily lime linden lion lobster lodge loom lotus lounge lumber magnet mango mantle maple
    marble market marsh mast meadow medal melon mesa meteor mill mineral mirror moon moose mop mosaic motor mountain
    museum napkin needle nest nickel noodle notebook nutmeg oak oasis oats ocean orchard orchid organ otter oven owl
    oyster paddle page palace palm panel panther paper parade parcel park parlor pasta path peach peacock pear pearl
    pebble pencil pepper petal piano pillow pilot pine pizza planet plaza plum pocket poem pond poppy porch portrait
    potato prairie prism puddle pump pumpkin puppet quail quarry quartz quilt quiver radar radio raft rail ranch
    raven reef ribbon rice ring river road robin rocket roof rope rose ruby rudder saddle sail salad salmon sandal
    satin saucer scarf scroll seed shell shelf ship shore shovel shrub silo sister sketch sleigh slipper smoke soap
    sofa sonnet sparrow spider spire sponge spoon spring spruce square squirrel stable stadium stamp star statue
    stone stove stream street studio sugar summit sunset swan table tailor tavern teapot temple tent terrace theater
    thicket thimble thistle thorn thread throne thumb thunder tiger timber toast tomato torch tower tractor trail
    train tray treasure tree trellis trumpet tulip tunnel turtle turnip vase valley vapor vault veranda village vine
    vinegar violin wagon walnut walrus water wave weaver wharf wheat wheel whistle willow window wing wizard wolf
    woodland yacht yard yarn zebra zinc zipper
""")
VERBS = _words("""
    absorb accept adapt adjust admire admit adopt advise agree allow amuse answer appear apply approve argue arrange
    arrive assist attend avoid balance become begin behave belong blend borrow breathe bring build bury carry catch
    choose clap climb collect combine compare complain confirm connect consider contain continue count cover create
    cross dance decide declare defend deliver depend describe deserve design destroy develop discuss divide drift
    drink earn educate encourage enjoy enter escape examine exist expand explain explore fasten fetch float follow
    forget forgive gather glance greet guard guess happen hesitate imagine improve include inform inspire invent
    invite join juggle jump knock laugh learn lend listen march measure melt mend mention multiply notice obey
    observe obtain offer operate organize paint perform permit persuade plant polish pour practice praise predict
    prefer prepare pretend prevent promise protect prove provide punish push race reach receive recognize record
    reduce refuse relax release remain remember remind repair repeat replace reply rescue return rinse roll rush
    satisfy scatter search select separate serve settle shelter shine shrug sing skip slide smile solve speak spell
    spend spread squeeze stare stir stretch suggest supply support suppose surround suspect swallow sweep swim teach
    thank touch trade travel trust understand unite vanish visit wait wander warn whisper wonder worry yawn yield
""")
_REAL = tuple(dict.fromkeys((*ADJECTIVES, *NOUNS, *VERBS)))


def number(rng: random.Random) -> str:
    """Seven digits, the first of them not 0."""
    return str(rng.randint(10**6, 10**7 - 1))


def identifier(rng: random.Random) -> str:
    """A version 4 UUID from 128 random bits."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def pair(rng: random.Random) -> str:
    """An adjective and a noun joined by a hyphen, evenly from all pairs."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


DRAWS = {"number": number, "identifier": identifier, "pair": pair}


def distinct(rng: random.Random, kind: str, taken: set[str]) -> str:
    """A draw of a kind that is not among the taken ones yet; it is added to them.

    Raises:
        TaskError: so many are taken already that no free one turns up.
    """
    for _ in range(1000):
        found = DRAWS[kind](rng)
        if found not in taken:
            taken.add(found)
            return found
    raise TaskError(f"{len(taken)} needles leave no free {kind}; lower --lengths or use another --haystack.")


def letters(rng: random.Random, length: int, how_many: int, alphabet: str = string.ascii_lowercase) -> list[str]:
    """Different random words of `length` letters, in the order in which they were drawn."""
    found: dict[str, None] = {}
    while len(found) < how_many:
        found["".join(rng.choices(alphabet, k=length))] = None
    return list(found)


def plain_words(rng: random.Random, how_many: int) -> list[str]:
    """Different English words in random order; where they do not suffice, compounds of two nouns are among them.

    Raises:
        TaskError: there are not so many.
    """
    words = list(_REAL)
    missing = how_many - len(words)
    if missing > 0:
        known = set(words)
        compounds = [first + second for first in NOUNS for second in NOUNS]
        free = [word for word in dict.fromkeys(compounds) if word not in known]
        if missing > len(free):
            raise TaskError(f"no list of {how_many} different words; lower --lengths.")
        words += rng.sample(free, missing)
    rng.shuffle(words)
    return words[:how_many]
