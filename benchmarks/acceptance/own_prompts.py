"""Prompts and wordings written for this project: what is asked about code, about documentation, and from nothing.

Sums and wordings are made up from lists, so that no benchmark's text is in them. The same generator gives the
same prompts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

CODE_TASKS = (
    "Explain what this Python {kind} does.\n\n```python\n{code}\n```",
    "Write a docstring for this {kind}.\n\n```python\n{code}\n```",
    "What does the following code do? Go through it step by step.\n\n```python\n{code}\n```",
    "Write unit tests for this {kind}.\n\n```python\n{code}\n```",
    "Rewrite this {kind} so that it is easier to read.\n\n```python\n{code}\n```",
    "Add type hints to this code.\n\n```python\n{code}\n```",
    "```python\n{code}\n```\n\nGive an example of how to use this {kind}.",
    "Find possible bugs in this {kind} and suggest fixes.\n\n```python\n{code}\n```",
    "Add a comment to every line of this code.\n\n```python\n{code}\n```",
    "Summarise this {kind} in one sentence.\n\n```python\n{code}\n```",
    "I am new to Python. Can you explain this code to me?\n\n{code}",
    "Review this {kind} as a senior developer would.\n\n```python\n{code}\n```",
    "Rewrite the following Python code in JavaScript.\n\n```python\n{code}\n```",
    "What are the inputs and outputs of this {kind}?\n\n```python\n{code}\n```",
    "Add error handling to this {kind}.\n\n```python\n{code}\n```",
    "Improve this code and return the whole {kind}.\n\n```python\n{code}\n```",
)

COMPLETE_TASKS = (
    "Complete the following Python function.\n\n```python\n{head}\n```",
    "Finish this function and return the whole code.\n```python\n{head}\n```",
    "Write the body of this function.\n\n{head}",
    "Implement this function so that it does what its docstring says:\n\n```python\n{head}\n```",
)

WRITE_TASKS = (
    "Write a Python function named {name} for this purpose: {what}",
    "Write a function to do the following in Python. {what}",
    "I need a Python function `{signature}`. {what}",
    "How would you implement this in Python? {what}",
)

PARAGRAPH_TASKS = (
    "Explain this paragraph in simple words.\n\n{text}",
    "Summarise the following text in one sentence.\n\n{text}",
    "Rewrite this text as a list of points.\n\n{text}",
    "{text}\n\nWrite a short code example for what this says.",
    "Write three questions that this text answers, and answer them.\n\n{text}",
    "Rewrite this paragraph for a blog post.\n\n{text}",
    "{text}\n\nWhat does this mean in practice?",
    "What are the most important facts in this text?\n\n{text}",
)

FUNCTION_TASKS = (
    "What does Python's `{name}` do? Give an example.",
    "How do I use `{name}` in Python?",
    "Show me a short program that uses `{name}`.",
    "Explain the parameters of `{signature}`.",
    "When should I use `{name}`, and when not?",
)

FOLLOW_UPS = (
    "Now say the same in one sentence.",
    "Can you explain why?",
    "Give me one more example.",
    "Rewrite your answer as a short list.",
    "Make it shorter.",
    "What is a common mistake here?",
    "How would you explain this to a child?",
    "Write your answer again, in a more formal tone.",
    "What should I check to be sure this is right?",
    "What would you do differently next time?",
    "Turn your answer into a table.",
    "Which part is the hardest, and why?",
)


def _words(text: str) -> list[str]:
    return text.split("/")


_NAMES = _words(
    "Ada/Ben/Carla/Dmitri/Elif/Farah/Goran/Hana/Ivan/Jonas/Kofi/Lena/Mateo/Nadia/Omar/Petra/Quentin/Rosa/Sven/Tariq/Uma"
)
_THINGS = _words("apples/books/coins/cards/eggs/flowers/candles/marbles/pencils/shells/stamps/stickers/tickets/toys")

# Numbers a, b, c, d; the text says what is asked. Divisions need not come out even: answers are the target's own.
_SUMS = (
    "{name} has {a} {thing} and buys {b} boxes of {c} {thing} each. How many {thing} does {name} have now?",
    "{name} sells {thing} for {b} dollars each. On Monday {name} sells {a} and on Tuesday twice as many. How much "
    "money does {name} make in the two days?",
    "A train travels {a} kilometres an hour for {b} hours and then {c} kilometres an hour for {d} hours. How far does "
    "it travel in all?",
    "{name} earns {c} dollars an hour and works {b} hours a day, {d} days a week. How much does {name} earn in "
    "{e} weeks?",
    "A tank holds {a} litres of water. {b} litres leak out every hour and {d} litres are poured in. How much water "
    "is in the tank after {e} hours?",
    "{name} reads {b} pages of a book with {a} pages every day. How many pages are left after {e} days?",
    "There are {a} students in a school. {p}% of them play football and half of the rest swim. How many students swim?",
    "{name} shares {a} {thing} among {e} friends and keeps the remainder. {other} gives {name} {b} more. How many "
    "{thing} does {name} have at the end?",
    "A shirt costs {a} dollars. It is sold at a discount of {p}%, and {name} buys {e} of them. How much does {name} "
    "pay?",
    "{name} is {b} years older than {other}. In {e} years the sum of their ages will be {a}. How old is {other} now?",
    "A field is {a} metres long and {b} metres wide. A fence costs {d} dollars a metre. How much does it cost to "
    "fence the whole field?",
    "{name} bakes {e} trays of {c} biscuits. {other} eats {d} of them and {name} packs the rest in bags of {e}. How "
    "many full bags are there?",
    "{name} saves {b} dollars every week and spends {d} dollars every month of four weeks. How much has {name} saved "
    "after {e} months?",
    "A car uses {d} litres of petrol for every {a} kilometres. How many litres does it use for a trip of {f} "
    "kilometres there and back?",
)
_ASK = (
    "{sum}",
    "{sum} Think step by step.",
    "{sum}\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
    "Solve this problem and show your work. {sum}",
)

_TOPICS = _words(
    "a walk in the forest/learning a musical instrument/the first day at a new job/a lost dog/growing tomatoes/"
    "a power cut/moving to another city/saving energy at home/an old lighthouse/a football match/cooking for friends/"
    "public libraries/a long train journey/the night sky/working from home/a broken bicycle/the city at dawn/"
    "recycling/a visit to the dentist/learning to swim/winter in the mountains/a family dinner/remote teams/"
    "sleep and health/a neighbour who plays the drums/electric cars/the history of bread/a school play/bees/"
    "the smell of rain/street markets/writing letters/chess/time zones/a robot that paints/good questions"
)
_CONCEPTS = _words(
    "photosynthesis/inflation/recursion/the water cycle/a hash table/gravity/supply and demand/vaccination/"
    "machine learning/plate tectonics/encryption/the immune system/compound interest/natural selection/a black hole/"
    "democracy/an operating system/the greenhouse effect/probability/a database index/the food chain/electricity/"
    "a stack and a queue/the scientific method/binary search/tides/an algorithm/opportunity cost/friction/DNA/"
    "a compiler/the solar system/big O notation/a neural network/evaporation/insurance/version control/logarithms"
)
_WRITING = (
    "Write a short story about {topic}.",
    "Write a poem of eight lines about {topic}.",
    "Write an email to a friend about {topic}.",
    "Write a blog post about {topic}.",
    "Give me five ideas for a talk about {topic}.",
    "Write a dialogue between two people about {topic}.",
    "Write the opening paragraph of an essay on {topic}.",
    "What are the advantages and disadvantages of {topic}?",
    "Pretend to be a journalist and report on {topic}.",
    "Describe {topic} in three sentences.",
)
_EXPLAINING = (
    "Explain {concept} to a ten-year-old.",
    "Explain {concept} in three sentences.",
    "What is {concept}, and why does it matter?",
    "Give two examples of {concept} from everyday life.",
    "Compare {concept} and {other}.",
    "Write a quiz with three questions about {concept}, with the answers.",
    "What do people often get wrong about {concept}?",
)


def sums(number: int, choose: random.Random) -> Iterator[str]:
    """Word problems of primary school arithmetic, `number` of them."""
    for at in range(number):
        name, other = choose.sample(_NAMES, 2)
        numbers = {
            "a": choose.randrange(40, 400),
            "b": choose.randrange(3, 40),
            "c": choose.randrange(4, 60),
            "d": choose.randrange(2, 12),
            "e": choose.randrange(2, 10),
            "f": choose.randrange(50, 900),
            "p": choose.randrange(1, 20) * 5,
        }
        text = _SUMS[at % len(_SUMS)].format(name=name, other=other, thing=choose.choice(_THINGS), **numbers)
        yield choose.choice(_ASK).format(sum=text)


def questions() -> Iterator[str]:
    """Every wording of writing and explaining with every topic and concept."""
    for topic in _TOPICS:
        for wording in _WRITING:
            yield wording.format(topic=topic)
    for at, concept in enumerate(_CONCEPTS):
        for wording in _EXPLAINING:
            yield wording.format(concept=concept, other=_CONCEPTS[at - 1])
