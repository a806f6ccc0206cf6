"""Questions of self-play: what a model is asked when it talks to itself, so that a draft head learns what it says.

There are kinds of questions, each with many forms whose gaps are filled by chance (`words`), so that hardly any is
asked twice. Two kinds are never learned from (`HELD_OUT`): they show how a draft head does on what it was not taught.
"""

from __future__ import annotations

from random import Random
from typing import Final

from shardcompute.draft_training.words import (
    LANDS,
    LANGUAGES,
    NAMES,
    PLACES,
    ROLES,
    SURNAMES,
    TASKS,
    THINGS,
    TONGUES,
    TOPICS,
    TRADES,
)

HELD_OUT: Final = frozenset({"rewriting", "riddle"})
KINDS: Final[dict[str, tuple[str, ...]]] = {
    "question": (
        "who wrote the first book about {topic}",
        "when did {topic} become popular in {land}",
        "what is the difference between {topic} and {other}",
        "where is the largest museum about {topic}",
        "how many people live in {place}",
        "who was the first {trade} to win an award in {land}",
        "what does {topic} mean",
        "when was the last time {land} hosted the world cup",
        "who plays the {trade} in the film about {topic}",
        "what is the capital of {land} and what is it known for",
        "why is {topic} important for {other}",
        "how does {topic} work",
        "who sang the song about {place} in {year}",
        "what happened in {place} in {year}",
        "what are the main parts of {topic}",
        "where did the name {surname} come from",
        "What is {topic}?",
        "What are the advantages and disadvantages of {topic}?",
        "What do {topic} and {other} have in common? Give {k} examples.",
        "What happened in the history of {topic} around {year}?",
        "True or false: {topic} existed in {year}. Explain.",
        "Which is older, {topic} or {other}?",
        "What questions should I ask an expert on {topic}?",
        "Can you recommend {k} books about {topic}?",
    ),
    "instruction": (
        "Explain {topic} to a curious child.",
        "List ten facts about {topic}, one per line.",
        "Write an email to a colleague about {topic}.",
        "Summarise what is known about {topic} and what is still disputed.",
        "Give me a step-by-step plan to learn about {topic} in {m} weeks.",
        "Write a product description for a toy about {topic} that costs {n} euros.",
        "Suggest {k} titles for a book about {topic} and {other}.",
        "Write a table that compares {topic}, {other} and {third}.",
        "Write a letter from {name} to the mayor of {place} about {topic}.",
        "Define {topic} in one sentence, then explain it in {k} paragraphs.",
        "Write a packing list and a plan of {k} days for a visit to {place}.",
        "Draft a speech about {topic} for a {trade}.",
        "Describe the experience of {topic} as seen by a {trade} in {place}.",
        "Make a multiple choice question about {topic} with four answers, and say which one is right.",
        "Give {k} tips for a {trade} who wants to move to {place}.",
        "Outline an essay on {topic} and its effect on {other}.",
        "Hello! I am {name}. Can you help me with {topic}?",
        "Write a persuasive text that convinces a {trade} to care about {topic}.",
        "Discuss the causes and consequences of {topic} in {land}. Give evidence.",
        "Explain the process of {topic} and the laws of nature behind it.",
        "Write a review of a restaurant in {place} for a newspaper.",
        "Compose an announcement: the {trade} {name} {surname} will talk about {topic} on {k} May.",
    ),
    "article": (
        "Write a news article about {topic} in {place}.",
        "Write a long newspaper report: {name} {surname}, a {trade} from {place}, and {topic}.",
        "Write an encyclopedia entry about {topic}.",
        "Write a detailed article on the history of {place} and its link with {topic}.",
        "Report on a match between {place} and {city} in the style of a sports journalist.",
        "Write a news story: police in {place} arrest a {trade} because of {things}.",
        "Write a biography of {name} {surname}, a {trade} who was born in {place} in {year}.",
    ),
    "story": (
        "Write a short story about {topic}.",
        "Write a dialogue in which two people argue about {topic}.",
        "Write the opening scene of a film about {topic} that is set in {place} in {year}.",
        "Continue this text: {name} opened the door, and all that could be seen was {topic}.",
        "Write a poem of {k} verses about {topic}.",
        "Write a fable in which a {trade} meets a fox and learns about {topic}.",
        "Tell a joke about a {trade} and {things}.",
        "Begin a mystery novel: {name} {surname} finds {n} {things} in an empty house in {place}.",
    ),
    "code": (
        "Write a {language} program that has to do with {topic} and explain how it works.",
        "Write a function in {language} that {task}.",
        "Write a {language} program that {task}. Add comments.",
        "How do I write a program in {language} that {task}?",
        "Find the bug in a {language} program that counts words about {topic}, and fix it.",
        "Write a class in {language} for {things} with methods to add, remove and list them, and test it.",
        "Write an SQL query that finds the {k} most expensive {things} of each {trade}.",
        "Write an HTML page about {topic} with a button that shows a list of {k} {things}.",
        "Explain what a {language} function that {task} does, line by line.",
        "Write unit tests in {language} for a function that {task}.",
    ),
    "maths": (
        "{name} has {n} {things} and buys {m} more every week. How many does {name} have after {k} weeks?",
        "{name} buys {k} {things} for ${m} each and pays with a ${big} bill. How much change is there?",
        "A {trade} earns ${n} per hour and works {k} hours a day, {m} days a month. How much is that per month?",
        "There are {n} {things} in a box. {name} takes half of them, and {other_name} takes {k}. How many are left?",
        "{name} reads {m} pages a day. A book has {big} pages. How many days are needed to read {k} such books?",
        "A train travels {n} miles in {k} hours. How far does it travel in {m} hours?",
        "{name} sold {n} {things} on Monday, twice as many on Tuesday, and {m} fewer on Wednesday than on Tuesday. How "
        "many were sold in the three days?",
        "A shop sells {things} at ${m} each. If {name} gets a {k}0% discount and buys {n} of them, what is the price?",
        "{name} is {k} years older than {other_name}, who is {n}. How old will they be together in {m} years?",
        "{n} {things} are shared equally among {k} friends, and the rest goes to {name}. How many does {name} get?",
        "It takes {name} {m} minutes to paint a chair. How many hours does it take to paint {n} chairs?",
        "In a class of {n} pupils, {k} play the piano and {m} play football. If nobody does both, how many do neither?",
        "{name} saves ${m} a week for {n} weeks, then spends a third of it on {things}. How much money is left?",
        "A farm has {n} cows and {m} times as many chickens. Each chicken lays {k} eggs a week. How many eggs are "
        "there in a week?",
        "{name} walks {k} miles to work and back, {m} days a month. How many miles is that in {k2} months?",
        "What is {n} times {m}, plus {k}? Show the steps.",
        "Solve for x: {k}x + {m} = {n}.",
        "A rectangle is {k} cm wide and {m} cm high. What are its area and the length of its diagonal?",
        "A bag holds {k} red and {m} blue {things}. How likely is it that two drawn ones are both red?",
        "Work out the mean of {k}, {m} and {n}, and how far each is from it.",
        "Make up an exam question about fractions of {things} and solve it step by step.",
    ),
    "role": (
        "You are {role}. Tell me about {topic}.",
        "Pretend to be {role} who meets {name} and talks about {topic}.",
        "Imagine that you are {role}. {name} asks you: “What should I know about {topic}?”",
        "Act as {role} and answer in character: why did you come to {place}?",
        "I want you to act as {role}. My first request is: help me with {topic}.",
        "It is the year {year}, and you are {role}. Write in your diary about {place}.",
    ),
    "reasoning": (
        "Which of these has least to do with {topic}: (a) {other}, (b) {third}, (c) {topic}? Explain your choice.",
        "{name} is taller than {other_name}, and {other_name} is taller than {third_name}. Who is the shortest? Why?",
        "Is the following sentence positive, negative or neutral? “{name} thought the talk about {topic} was fine.”",
        "{name} sits between {other_name} and {third_name}. Who can sit next to whom if {name} leaves?",
        "Some people say that {topic} is worse than {other}. Weigh the arguments and decide.",
        "A shop closes {k} hours after noon and opens {k2} hours before it. How long is it open? Explain.",
        "Compare {topic} and {other}. Which one would a {trade} choose, and why?",
        "If all {things} in {place} were gone tomorrow, what would happen first?",
        "What is the next number: {k}, {k2}, {n}? Give your reasons.",
    ),
    "riddle": (
        "I have {k} legs in the morning and {k2} in the evening, and a {trade} fears me. What am I? Think aloud.",
        "Make up a riddle about {things} and give its answer.",
        "Invent a rhyme for children about {topic}, with a refrain.",
        "A haiku about {topic} and {place}, please, and one about {other}.",
    ),
    "rewriting": (
        "Rewrite this more politely: “I do not care about {topic}, {name}, leave me alone.”",
        "Make this sound like a {trade}: “{name} knows much about {topic} and never says so.”",
        "Turn this note into a friendly message: “{name} {surname}, {place}, {n} {things}, Friday, do not be late.”",
        "Say the same in other words, {k} times: {topic} made {place} rich.",
    ),
}
_MANNERS: Final = (
    *(
        "",
        "",
        "",
        "",
        "",
        "",
        " Answer briefly.",
        " Be detailed.",
        " Use simple words.",
        " Use a numbered list.",
    ),
    *(
        " Give an example.",
        " Answer in {k} sentences.",
        " Be formal.",
        " Explain why.",
        " Use less than {big} words.",
    ),
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
    "Write that as a letter to a friend.",
    "Now do the same for {topic} in {place}.",
    "What if there were {n} {things} instead?",
    "Take the answer above and add {k} more {things}.",
    "Do you recall any more about {topic}? Name one thing.",
)
SUMMARY_ASKS: Final = (
    "Summarize: ",
    "Summarise this text in one sentence: ",
    "Summarize the following article in three sentences.\n\n",
    "What is this text about?\n\n",
    "Give the main points of the text below as a list.\n\n",
    "TL;DR of this: ",
)
EXTRACTION_ASKS: Final = (
    "Extract all names, numbers and dates as JSON: ",
    "List every person and every place in this text:\n\n",
    "Copy the following text word by word: ",
    "Answer from the text alone: who, where and when?\n\n",
    "Put the facts of this text into a table.\n\n",
    "Find all numbers of the text and say what each means.\n\n",
    "Repeat the second sentence of this text: ",
)
TRANSLATION_ASKS: Final = (
    "Translate {} to English: ",
    "Translate from {} into English: ",
    "What does this {} text mean? ",
)
RETRIEVAL_ASKS: Final = (
    ("Answer the question from these passages.\n\n", "Question: "),
    ("", "Answer the question: "),
    ("Context:\n", "Using the context above, answer: "),
    ("Question: ", "\n\nDocuments:\n"),
)
CODE_ASKS: Final = (
    "Explain what this code does:\n\n",
    "Add type hints to this function:\n\n",
    "Write a test for this code:\n\n",
    "Is there a bug in this code?\n\n",
    "Rewrite this function so that it is shorter:\n\n",
)


def ask(random: Random, kind: str) -> str:
    """A question of that kind about anything."""
    return fill(random.choice(KINDS[kind]) + random.choice(_MANNERS), random)


def fill(text: str, random: Random) -> str:
    """The text with something by chance in each of its gaps."""
    topics, names = random.sample(TOPICS, 3), random.sample(NAMES, 3)
    places = random.sample(PLACES, 2)
    return text.format(
        topic=topics[0],
        other=topics[1],
        third=topics[2],
        name=names[0],
        other_name=names[1],
        third_name=names[2],
        surname=random.choice(SURNAMES),
        place=places[0],
        city=places[1],
        land=random.choice(LANDS),
        trade=random.choice(TRADES),
        things=random.choice(THINGS),
        tongue=random.choice(TONGUES),
        language=random.choice(LANGUAGES),
        task=random.choice(TASKS),
        role=random.choice(ROLES),
        year=random.randint(1500, 2024),
        n=random.randint(11, 98),
        m=random.randint(3, 24),
        k=random.randint(2, 9),
        k2=random.randint(3, 12),
        big=10 * random.randint(5, 60),
    )
