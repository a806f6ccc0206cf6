"""Questions of self-play: what a model is asked when it talks to itself, so that a draft head learns what it says.

`TOPICS` and `ASKS` are the plain questions; `ask` makes up one of very many, so that hardly any is asked twice.
"""

from __future__ import annotations

from random import Random
from typing import Final

TOPICS: Final = (
    *(
        "the tides",
        "a market town in winter",
        "sorting numbers",
        "the history of printing",
        "growing tomatoes",
    ),
    *("how money works", "the human heart", "a lighthouse keeper", "electric cars", "learning to swim"),
    *(
        "the planet Mars",
        "a broken clock",
        "football",
        "the French Revolution",
        "baking bread",
        "black holes",
    ),
    *("a lost letter", "web servers", "dreams", "the stock market", "bees", "Shakespeare", "road safety"),
    *(
        "a family of foxes",
        "vaccines",
        "chess",
        "an old bridge",
        "climate",
        "job interviews",
        "the Roman army",
    ),
    *("prime numbers", "a journey by train", "jazz", "earthquakes", "a small business", "sleep", "volcanoes"),
)
ASKS: Final = (
    "Explain {} to a curious child.",
    "Write a short story about {}.",
    "List ten facts about {}, one per line.",
    "Write a Python program that has to do with {} and explain how it works.",
    "What would you tell a friend who asks about {}? Answer in a few paragraphs.",
    "Write an email to a colleague about {}.",
    "Summarise what is known about {} and what is still disputed.",
    "Make up an exam question about {} and solve it step by step.",
    "Translate a sentence about {} into French and German.",
    "Write a dialogue in which two people argue about {}.",
)
_MORE_TOPICS: Final = (
    *("the moon", "coffee", "a night at the theatre", "solar panels", "the Silk Road", "knitting", "whales"),
    *("a haunted house", "inflation", "the alphabet", "glaciers", "a robot that cooks", "public libraries"),
    *("photosynthesis", "the Olympic Games", "a desert island", "databases", "the common cold", "origami"),
    *(
        "the Great Wall",
        "a school play",
        "cheese",
        "recursion",
        "the Amazon river",
        "gravity",
        "a hotel in Rome",
    ),
    *(
        "encryption",
        "horses",
        "a birthday party",
        "the immune system",
        "bicycles",
        "antibiotics",
        "city parks",
    ),
    *("a detective in Lisbon", "probability", "the Aztecs", "remote work", "mushrooms", "satellites", "tea"),
    *(
        "the violin",
        "a storm at sea",
        "linked lists",
        "tax returns",
        "coral reefs",
        "a new neighbour",
        "rice",
    ),
    *("the Industrial Revolution", "cooking pasta", "meditation", "a lost dog", "wind turbines", "fractions"),
    *("neural networks", "the Vikings", "a mountain village", "running a marathon", "recycling", "dinosaurs"),
    *("a wedding speech", "the speed of light", "houseplants", "a time machine", "elections", "camping"),
)
_LANGUAGES: Final = ("Python", "JavaScript", "C", "Rust", "SQL", "Go", "Java", "Bash", "HTML")
_TONGUES: Final = ("French", "Spanish", "German", "Italian", "Portuguese", "Dutch", "Polish", "Japanese")
_NAMES: Final = (
    "Anna",
    "Ben",
    "Chiara",
    "David",
    "Elena",
    "Farid",
    "Grace",
    "Hiro",
    "Ines",
    "Jonas",
    "Mei",
    "Omar",
)
_ROLES: Final = (
    *("a pirate", "a strict teacher", "a travel guide", "a doctor", "a customer service agent", "a poet"),
    *(
        "a medieval knight",
        "a software engineer",
        "a grandmother",
        "a news reporter",
        "a chef",
        "a philosopher",
    ),
)
_MORE_ASKS: Final = (
    "Translate into {tongue}: “{name} has been reading about {topic} since {year}, and likes it very much.”",
    "How do you say “Where can I learn more about {topic}?” in {tongue}?",
    "{name} has {n} books about {topic} and buys {m} more every month. How many are there after {k} months?",
    "A ticket to an exhibition about {topic} costs {n} euros; {k} friends go, and one pays half. What do they pay?",
    "What is {n} times {m}, plus {k}? Show the steps.",
    "Summarise this paragraph in one sentence: {name} first heard of {topic} in {year}. At that time hardly anybody "
    "in town cared, but {m} years later there was a club with {n} members, and even the mayor came to its meetings.",
    "Extract all names, numbers and dates as JSON: On {k} May {year}, {name} paid {n} dollars for {m} lessons about "
    "{topic}.",
    "You are {role}. Tell me about {topic}.",
    "Pretend to be {role} who meets {name} and talks about {topic}.",
    "Write a {language} program that has to do with {topic}.",
    "Write a function in {language} that takes a list of numbers and returns the {k} largest. Explain it.",
    "Find the bug in a {language} program that counts words about {topic}, and fix it.",
    "Make a multiple choice question about {topic} with four answers, and say which one is right.",
    "Which of these has least to do with {topic}: (a) {other}, (b) {third}, (c) {topic}? Explain your choice.",
    "Compare {topic} and {other}.",
    "What do {topic} and {other} have in common? Give {k} examples.",
    "Write a poem of {k} verses about {topic}.",
    "Give me a step-by-step plan to learn about {topic} in {m} weeks.",
    "What are the advantages and disadvantages of {topic}? Use bullet points.",
    "Rewrite this more politely: “I do not care about {topic}, {name}, leave me alone.”",
    "Correct the grammar: “{name} don't knows nothing about {topic} and he never have.”",
    "Is the following sentence positive, negative or neutral? “{name} thought that the talk about {topic} was fine.”",
    "Write a product description for a toy about {topic} that costs {n} euros.",
    "Suggest {k} titles for a book about {topic} and {other}.",
    "What happened in the history of {topic} around {year}?",
    "Write a table that compares {topic}, {other} and {third}.",
    "Write a letter from {name} to the mayor about {topic}.",
    "Define {topic} in one sentence, then explain it in {k} paragraphs.",
    "Who was {name} in your story about {topic}? Describe the character.",
    "Write the opening scene of a film about {topic} that is set in {year}.",
    "What questions should I ask an expert on {topic}?",
    "Hello! I am {name}. Can you help me with {topic}?",
    "Continue this text: {name} opened the door, and all that could be seen was {topic}.",
    "True or false: {topic} existed in {year}. Explain.",
)
_MANNERS: Final = (
    *("", "", "", "", " Answer briefly.", " Be detailed.", " Use simple words.", " Use a numbered list."),
    *(" Give an example.", " Answer in {k} sentences.", " Be funny.", " Be formal.", " Explain why."),
)
FOLLOW_UPS: Final = (
    "Can you explain that again in simpler words?",
    "Please make it shorter.",
    "Give me another example.",
    "Why is that?",
    "Translate that into {tongue}.",
    "And what about {topic}?",
    "Thank you! What should I do next?",
    "Turn that into a list of {k} points.",
    "I do not think that is right. Check it again.",
)


def ask(random: Random) -> str:
    """A question about anything."""
    topic = random.choice(TOPICS + _MORE_TOPICS)
    choice = random.choice(ASKS + _MORE_ASKS)
    return fill(choice.replace("{}", topic) + random.choice(_MANNERS), random)


def fill(text: str, random: Random) -> str:
    """The text with something by chance in each of its gaps."""
    topics = random.sample(TOPICS + _MORE_TOPICS, 3)
    return text.format(
        topic=topics[0],
        other=topics[1],
        third=topics[2],
        tongue=random.choice(_TONGUES),
        language=random.choice(_LANGUAGES),
        name=random.choice(_NAMES),
        role=random.choice(_ROLES),
        year=random.randint(1500, 2024),
        n=random.randint(11, 98),
        m=random.randint(3, 24),
        k=random.randint(2, 9),
    )
