"""Words of self-play: what fills the gaps of the forms in `questions`, and sentences of other tongues."""

from __future__ import annotations

from random import Random
from typing import Final


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


TOPICS: Final = _list(
    "the tides, a market town in winter, sorting numbers, the history of printing, growing tomatoes, how money works, "
    "the human heart, a lighthouse keeper, electric cars, learning to swim, the planet Mars, a broken clock, football, "
    "the French Revolution, baking bread, black holes, a lost letter, web servers, dreams, the stock market, bees, "
    "Shakespeare, road safety, a family of foxes, vaccines, chess, an old bridge, climate, job interviews, sleep, "
    "the Roman army, prime numbers, a journey by train, jazz, earthquakes, a small business, volcanoes, the moon, "
    "coffee, a night at the theatre, solar panels, the Silk Road, knitting, whales, a haunted house, inflation, "
    "the alphabet, glaciers, a robot that cooks, public libraries, photosynthesis, the Olympic Games, databases, "
    "a desert island, the common cold, origami, the Great Wall, a school play, cheese, recursion, the Amazon river, "
    "gravity, a hotel in Rome, encryption, horses, a birthday party, the immune system, bicycles, antibiotics, "
    "city parks, a detective in Lisbon, probability, the Aztecs, remote work, mushrooms, satellites, tea, the violin, "
    "a storm at sea, linked lists, tax returns, coral reefs, a new neighbour, rice, the Industrial Revolution, "
    "cooking pasta, meditation, a lost dog, wind turbines, fractions, neural networks, the Vikings, recycling, "
    "a mountain village, running a marathon, dinosaurs, a wedding speech, the speed of light, houseplants, elections, "
    "a time machine, camping, the periodic table, ancient Egypt, the electric guitar, plate tectonics, penguins, "
    "the water cycle, credit cards, hurricanes, the Renaissance, machine learning, honey, the United Nations, "
    "yoga, the internet, tigers, the nervous system, airports, chocolate, the Cold War, soil, a chess tournament, "
    "diabetes, rockets, the Moon landing, trade unions, operating systems, butterflies, supply and demand, wine, "
    "the ozone layer, a science fair, the printing press, ants, renewable energy, gardening, the Middle Ages, "
    "mental health, compilers, rainforests, bridges, the Great Depression, vitamins, quantum mechanics, insurance, "
    "a street musician, nuclear power, opera, evolution, magnets, the digestive system, castles, video games, "
    "a bakery, social media, the Second World War, DNA, a ferry, blood pressure, the Sahara, gold, a strike, "
    "cybersecurity, the piano, owls, urban planning, a robbery, the Mediterranean diet, drones, the solar system, "
    "tourism, a court case, salt, cloud computing, the brain, pottery, exercise, a flood, robots, the euro, sharks, "
    "photography, a football match, online shopping, batteries, the Arctic, a museum, allergies, subways, wolves, "
    "a prison break, wheat, artificial intelligence, hiking, the heart of a city, minimum wage, pandemics, poetry"
)
NAMES: Final = _list(
    "Anna, Ben, Chiara, David, Elena, Farid, Grace, Hiro, Ines, Jonas, Mei, Omar, Liam, Olivia, Noah, Emma, James, "
    "Sophia, Lucas, Isabella, Ethan, Mia, Mason, Amelia, Logan, Harper, Jacob, Evelyn, Daniel, Abigail, Henry, Emily, "
    "Samuel, Priya, Ravi, Aisha, Kwame, Fatima, Yusuf, Ingrid, Lars, Katya, Dmitri, Carlos, Lucia, Pedro, Maria, "
    "Giulia, Marco, Claire, Julien, Tom, Sarah, Mark, Wanda, Hugo, Selma, Anton, Paula, Felix, Rosa"
)
SURNAMES: Final = _list(
    "Smith, Johnson, Brown, Miller, Davis, Garcia, Wilson, Anderson, Taylor, Moore, Lee, Walker, Hall, Young, King, "
    "Wright, Lopez, Hill, Green, Baker, Nelson, Carter, Mitchell, Roberts, Turner, Phillips, Campbell, Parker, Evans, "
    "Edwards, Collins, Stewart, Morris, Murphy, Cook, Rogers, Reed, Bailey, Cooper, Schmidt, Rossi, Dubois, Tanaka"
)
PLACES: Final = _list(
    "London, Paris, Berlin, Madrid, Rome, Lisbon, Vienna, Prague, Dublin, Oslo, Stockholm, Copenhagen, Amsterdam, "
    "Brussels, Warsaw, Athens, Istanbul, Cairo, Nairobi, Lagos, Cape Town, Mumbai, Delhi, Bangkok, Singapore, Tokyo, "
    "Seoul, Beijing, Sydney, Auckland, Toronto, Vancouver, Chicago, Boston, Seattle, Denver, Houston, Miami, Atlanta, "
    "New York, Los Angeles, San Francisco, Mexico City, Lima, Bogota, Santiago, Buenos Aires, Manchester, Glasgow, "
    "Nebraska, Kansas, Ohio, Texas, Florida, Yorkshire, Bavaria, Tuscany, Provence, Andalusia, Kerala, Hokkaido"
)
LANDS: Final = _list(
    "France, Germany, Spain, Italy, Portugal, Brazil, Mexico, Canada, Japan, China, India, Egypt, Kenya, Nigeria, "
    "Australia, Norway, Sweden, Poland, Greece, Turkey, Argentina, Peru, South Korea, Vietnam, Ireland, Scotland, "
    "the Netherlands, Switzerland, Austria, Russia, South Africa, Thailand, Indonesia, the United States, England"
)
TRADES: Final = _list(
    "teacher, nurse, baker, engineer, farmer, lawyer, painter, carpenter, doctor, pilot, librarian, plumber, chef, "
    "journalist, scientist, police officer, firefighter, mechanic, architect, musician, accountant, translator, "
    "gardener, fisherman, photographer, tailor, dentist, electrician, manager, student, designer, programmer"
)
ROLES: Final = _list(
    "a pirate, a strict teacher, a travel guide, a doctor, a customer service agent, a poet, a medieval knight, "
    "a software engineer, a grandmother, a news reporter, a chef, a philosopher, a detective, a football coach, "
    "a wizard, an alien who visits Earth, a stand-up comedian, a judge, a ship's captain, a space explorer, a robot, "
    "a king, a sports commentator, a therapist, a fortune teller, a history professor, a salesman, a fairy, a vampire"
)
THINGS: Final = _list(
    "apples, oranges, books, pencils, marbles, cookies, cupcakes, eggs, flowers, roses, stickers, cards, coins, "
    "balloons, chairs, tickets, bottles of water, bags of rice, loaves of bread, pizzas, sandwiches, toys, shirts, "
    "pairs of socks, bricks, boxes, candles, fish, chickens, cows, trees, pages, stamps, crayons, bananas, lemons, "
    "cups of coffee, bracelets, muffins, puzzles, seashells, tomatoes, cars, bikes, plates, kilometers, miles"
)
LANGUAGES: Final = _list("Python, JavaScript, C, C++, Rust, SQL, Go, Java, Bash, HTML, TypeScript, Ruby")
TONGUES: Final = _list(
    "French, Spanish, German, Italian, Portuguese, Dutch, Polish, Japanese, Chinese, Russian"
)
TASKS: Final = _list(
    "reverses a string, finds the largest number in a list, checks whether a word is a palindrome, counts the vowels "
    "of a text, computes the factorial of a number, merges two sorted lists, removes duplicates from a list, sorts "
    "a list of names, finds all prime numbers up to a limit, prints a multiplication table, reads a file and counts "
    "its lines, validates an email address, converts Celsius to Fahrenheit, finds the longest word of a sentence, "
    "adds two matrices, searches a sorted list, groups words by their first letter, computes the average of a column, "
    "implements a stack, implements a queue, walks a binary tree, finds the shortest path in a graph, rolls dice, "
    "parses a date, rounds prices, counts how often each word occurs, computes compound interest, flattens "
    "a nested list, checks whether brackets are balanced, simulates a bank account, downloads a web page, plays tic "
    "tac toe, generates a password, converts numbers to binary, draws a histogram"
)
_SENTENCES: Final = {
    "German": (
        "{w} hat am {d} in {p} über {t} gesprochen|Die Regierung will {t} bis {y} verbessern|Viele Menschen in {p} "
        "glauben nicht mehr an {t}|Der Bericht über {t} wird in {n} Tagen veröffentlicht|{w} sagte, man müsse {t} "
        "ernst nehmen|Nach Angaben der Polizei wurden in {p} {n} Personen verletzt|Wir können {t} nicht ohne Hilfe "
        "lösen|Das Parlament in {p} stimmte mit {n} Stimmen für {t}|Im Jahr {y} gab es in {p} noch keine Diskussion "
        "über {t}|Es ist wichtig, dass {t} auch für junge Leute zugänglich ist|Trotzdem bleibt {t} ein Problem, das "
        "niemand lösen will|{w} wohnt seit {y} in {p} und arbeitet dort als Lehrer",
        "die Wirtschaft, den Verkehr, die Schule, das Klima, die Gesundheit, den Tourismus, die Sicherheit, die Musik, "
        "den Sport, die Arbeit, die Wissenschaft, den Handel, die Geschichte, das Internet, die Landwirtschaft",
    ),
    "French": (
        "{w} a parlé de {t} à {p} le {d}|Le gouvernement veut améliorer {t} avant {y}|Beaucoup de gens à {p} ne "
        "croient plus à {t}|Le rapport sur {t} sera publié dans {n} jours|Selon la police, {n} personnes ont été "
        "blessées à {p}|Nous ne pouvons pas résoudre {t} sans aide|Il est important que {t} soit accessible aux jeunes|"
        "En {y}, personne ne parlait de {t} à {p}",
        "l'économie, la santé, l'école, le climat, la sécurité, la musique, le sport, le travail, la science",
    ),
    "Spanish": (
        "{w} habló de {t} en {p} el {d}|El gobierno quiere mejorar {t} antes de {y}|Mucha gente en {p} ya no cree en "
        "{t}|El informe sobre {t} se publicará en {n} días|Según la policía, {n} personas resultaron heridas en {p}|"
        "No podemos resolver {t} sin ayuda|Es importante que {t} sea accesible para los jóvenes|En {y} nadie hablaba "
        "de {t} en {p}",
        "la economía, la salud, la escuela, el clima, la seguridad, la música, el deporte, el trabajo, la ciencia",
    ),
    "Italian": (
        "{w} ha parlato di {t} a {p} il {d}|Il governo vuole migliorare {t} entro il {y}|Molti a {p} non credono più a "
        "{t}|Il rapporto su {t} sarà pubblicato tra {n} giorni|Non possiamo risolvere {t} senza aiuto",
        "l'economia, la salute, la scuola, il clima, la sicurezza, la musica, lo sport, il lavoro, la scienza",
    ),
    "Portuguese": (
        "{w} falou sobre {t} em {p} no dia {d}|O governo quer melhorar {t} até {y}|Muita gente em {p} já não acredita "
        "em {t}|O relatório sobre {t} será publicado em {n} dias|Não podemos resolver {t} sem ajuda",
        "a economia, a saúde, a escola, o clima, a segurança, a música, o esporte, o trabalho, a ciência",
    ),
    "Dutch": (
        "{w} sprak op {d} in {p} over {t}|De regering wil {t} voor {y} verbeteren|Veel mensen in {p} geloven niet meer "
        "in {t}|Het verslag over {t} verschijnt over {n} dagen|Wij kunnen {t} niet zonder hulp oplossen",
        "de economie, de gezondheid, de school, het klimaat, de veiligheid, de muziek, de sport, het werk",
    ),
}
_GERMAN_SHARE: Final = 0.4


def tongue_text(random: Random, sentences: int) -> tuple[str, str]:
    """A tongue, and so many sentences in it."""
    tongue = "German" if random.random() < _GERMAN_SHARE else random.choice(list(_SENTENCES))
    forms, topics = _SENTENCES[tongue]
    said = [
        random.choice(forms.split("|")).format(
            w=f"{random.choice(NAMES)} {random.choice(SURNAMES)}",
            d=f"{random.randint(1, 28)}.{random.randint(1, 12)}.",
            p=random.choice(PLACES),
            t=random.choice(_list(topics)),
            y=random.randint(1950, 2040),
            n=random.randint(3, 400),
        )
        for _ in range(sentences)
    ]
    return tongue, ". ".join(said) + "."
