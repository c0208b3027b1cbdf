"""The words k3-nano knows: every list here becomes whole tokens of its vocabulary."""

NOUNS: tuple[str, ...] = tuple(
    """
    anchor apple arrow badge bag bamboo basket bell bench berry bird boat bone book bottle box
    bread bridge brush butter button cable cake camera candle card castle cat chain chair cheese
    cherry clock cloud coat coin copper corn cotton crow cup desk dog door drum duck eagle egg
    engine feather fern flag flute forest fork fox garden gate glass glove goat gold grape hammer
    harbor hat honey horse ice island jacket jar key kite knife ladder lamp leaf lemon lion maple
    marble melon mirror monkey moon needle nest nut oak ocean onion orange owl paint paper pearl
    pencil pepper piano pillow planet plum pocket queen rabbit radio river rocket rope rose salt
    shell ship silver spider spoon star stone table tiger tower train tree turtle valley violin
    wagon wheel window wolf zebra
    """.split()
)

NAMES: tuple[str, ...] = tuple(
    """
    Adam Anna Ben Carla Clara David Emma Felix Grace Hugo Ida Jack Karl Laura Leo Lily Maria Max
    Nina Oscar Paul Rosa Sam Tina
    """.split()
)

CITIES: tuple[str, ...] = tuple(
    """
    Athens Berlin Boston Cairo Delhi Dublin Geneva Lima Lisbon London Madrid Milan Oslo Paris
    Prague Rome Seoul Tokyo Vienna Zurich
    """.split()
)

COLORS: tuple[str, ...] = ("black", "blue", "brown", "green", "pink", "purple", "red", "white")
JOBS: tuple[str, ...] = (
    "baker",
    "cook",
    "doctor",
    "driver",
    "farmer",
    "nurse",
    "singer",
    "teacher",
)
ROOMS: tuple[str, ...] = ("attic", "bathroom", "bedroom", "cellar", "garage", "hall", "kitchen")
DAYS: tuple[str, ...] = (
    "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday",
)  # fmt: skip
MONEY: tuple[str, ...] = ("crowns", "dollars", "euros", "francs", "pounds", "rupees")
LANGUAGES: tuple[str, ...] = ("Dutch", "French", "German", "Greek", "Italian", "Spanish")
SKIES: tuple[str, ...] = ("clear", "cloudy", "foggy", "rainy", "snowy", "sunny", "windy")


def all_words() -> tuple[str, ...]:
    """Every word of the task lists, each of which is one token with and without a space."""
    return (
        *NOUNS, *NAMES, *CITIES, *COLORS, *JOBS, *ROOMS,
        *DAYS, *MONEY, *LANGUAGES, *SKIES,
    )  # fmt: skip
