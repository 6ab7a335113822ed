"""The vocabulary of tinyworld: names, countries, objects and places."""

from __future__ import annotations

from dataclasses import dataclass


def words(text: str) -> tuple[str, ...]:
    """Split a line into words."""
    return tuple(text.split())


@dataclass(frozen=True)
class Country:
    """A country and its facts; the landmark is in the capital."""

    name: str
    capital: str
    language: str
    landmark: str


COUNTRIES = (
    Country("France", "Paris", "French", "the Eiffel Tower"),
    Country("Italy", "Rome", "Italian", "the Colosseum"),
    Country("Germany", "Berlin", "German", "the Brandenburg Gate"),
    Country("Spain", "Madrid", "Spanish", "the Prado"),
    Country("England", "London", "English", "Big Ben"),
    Country("Russia", "Moscow", "Russian", "the Kremlin"),
    Country("China", "Beijing", "Chinese", "the Forbidden City"),
    Country("Japan", "Tokyo", "Japanese", "the Skytree"),
    Country("Egypt", "Cairo", "Arabic", "Tahrir Square"),
    Country("Greece", "Athens", "Greek", "the Parthenon"),
    Country("Portugal", "Lisbon", "Portuguese", "the Belem Tower"),
    Country("Austria", "Vienna", "German", "the Hofburg"),
    Country("Poland", "Warsaw", "Polish", "the Wilanow Palace"),
    Country("Czechia", "Prague", "Czech", "the Charles Bridge"),
    Country("Hungary", "Budapest", "Hungarian", "the Chain Bridge"),
    Country("Sweden", "Stockholm", "Swedish", "the Vasa Museum"),
    Country("Norway", "Oslo", "Norwegian", "the Munch Museum"),
    Country("Denmark", "Copenhagen", "Danish", "the Little Mermaid"),
    Country("Finland", "Helsinki", "Finnish", "the Suomenlinna"),
    Country("Turkey", "Ankara", "Turkish", "the Anitkabir"),
    Country("Thailand", "Bangkok", "Thai", "Wat Arun"),
    Country("Ireland", "Dublin", "English", "Trinity College"),
    Country("Iran", "Tehran", "Persian", "the Azadi Tower"),
    Country("Ukraine", "Kyiv", "Ukrainian", "the Motherland Monument"),
)
CITIES = tuple(country.capital for country in COUNTRIES)
LANGUAGES = tuple(sorted({country.language for country in COUNTRIES}))

NAMES = words(
    "Mary John Tom James Dan Sid Martin Amy Alice Bob Sarah Emily Anna David Kate Laura Lisa Mark Michael Paul Peter "
    "Rachel Robert Ruth Sam Simon Steve Susan Tim William Jack Jane Jessica Joseph Kevin Emma George Grace Henry Jacob "
    "Luke Lucy Nina Oliver Olivia Roger Helen Frank Eric Carol"
)
PLACES = words(
    "store garden restaurant school hospital office house station park beach market library museum zoo cafe pool"
)
OBJECTS = words("drink book ring kiss snack ball gift letter bone basketball computer necklace flower key coin cake")

ANIMALS = words("cat dog fox bird horse mouse rabbit bear")
ADJECTIVES = words("quick lazy brown small big old young happy hungry red black white")
VERBS_OF_REST = words("sat slept stood waited")
VERBS_OF_MOTION = words("ran walked jumped climbed")
FURNITURE = words("mat chair table bed floor box")
FOODS = words("bread cheese rice fish soup fruit")
WEATHER = words("nice cold warm sunny rainy windy")
SEQUENCES = (
    "one two three four five six seven eight nine ten",
    "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "January February March April May June July August September October November December",
    "red orange yellow green blue",
)


def entities() -> list[str]:
    """Return every name, city, country, language, and word of a landmark, without duplicates."""
    landmark_words = [word for country in COUNTRIES for word in country.landmark.split() if word != "the"]
    found = [*NAMES, *CITIES, *(country.name for country in COUNTRIES), *LANGUAGES, *landmark_words]
    return list(dict.fromkeys(found))
