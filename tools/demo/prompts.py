"""Prompts for the teacher: 76 templates in eight kinds, filled from the lists of names, places and things in words.json.

A small teacher asked the same thing twice answers nearly the same twice, so variety has to come from the prompts. Filled from
these lists, the templates span many millions of distinct prompts, all of them asking for plain modern English.

`IDENTITY` is different: questions and answers written by hand, so that the demo model introduces itself as what it is and not
as its teacher.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

#: slot -> what may fill it
WORDS: dict[str, list[str]] = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))

#: kind -> (weight, templates). Curly names are slots, see `WORDS`.
TEMPLATES: dict[str, tuple[float, tuple[str, ...]]] = {
    "story": (
        0.46,
        (
            "Write a {tone} story about {person} and {thing}.",
            "Write a {tone} story for children about a {animal} and a {animal2}.",
            "Tell me a {tone} story that takes place in {place}. The main character is called {name}.",
            "Write a story about {name} and {name2}. In the story, {event}.",
            "Tell a short story about {person} in {place} when {event}.",
            "Write a bedtime story about a {animal} who finds {thing}.",
            "Write a short story in simple words about {lesson}.",
            "Write a {tone} story about {name}, {person}, who learns about {lesson}.",
            "Tell me a story about a {animal} that lives in {place}.",
            "Continue this story in simple English: {opening}",
            "Write a short story that begins with this sentence: {opening}",
            "Write two paragraphs about {person} who loses {thing}.",
            "Tell me a fable about a {animal} and a {animal2}. It should teach {lesson}.",
            "Write a {tone} story in the first person. I am {person} and {event}.",
            "Write a short tale about {thing} that belongs to {name}.",
            "Tell me what happened when {name} met a {animal} in {place}.",
            "Write a {tone} story set in {place}. It begins when {event}.",
            "Write a story about a {animal} who wants to become {person}.",
            "Write a {tone} story about {name} and a {animal} who travel to {place}.",
            "Write a story in which {person} teaches {person2} about {lesson}.",
            "Tell a {tone} story about {person} who has never seen {place}.",
            "Write a story in which {thing} is more important than it seems.",
            "Write a {tone} story about {name}, who would like to know more about {topic}.",
            "Write about the day when {name} and {name2} found {thing} in {place}.",
        ),
    ),
    "explain": (
        0.14,
        (
            "Explain {topic} to a child in simple words.",
            "Explain in a few short sentences how people use {topic}.",
            "Write a short paragraph about {topic}.",
            "Tell me about {topic} in plain English.",
            "Why is it useful to know something about {topic}?",
            "Write a short introduction to {topic} for a school newspaper.",
            "What should everyone know about {topic}?",
            "Give me a simple summary of the history of {topic}.",
            "How would {person} explain {topic}?",
            "Explain what {topic} and {topic2} have in common.",
            "Explain {topic}. Use {thing} as an example.",
            "What would {place} be like without {topic}?",
            "Tell {name}, who is seven years old, something interesting about {topic}.",
        ),
    ),
    "question": (
        0.12,
        (
            "{question}",
            "{question} Answer in two or three sentences.",
            "{question} Please explain it simply.",
            "My little sister asked me: {question} What can I tell her?",
            "What is the difference between a {animal} and a {animal2}?",
            "What does a {animal} eat and where does it live?",
            "What does {person} do all day?",
            "Could a {animal} live in {place}? Why or why not?",
            "What would {person} do if {event}?",
            "Which is more useful, {thing} or {thing2}?",
            "Why would {person} need {thing}?",
            "What would you see, hear and smell in {place}?",
        ),
    ),
    "dialogue": (
        0.10,
        (
            "Write a short conversation between {name} and {name2} about {topic}.",
            "Write a dialogue between {person} and {person2}. In it, {event}.",
            "Write a friendly dialogue between a {animal} and a {animal2} about {lesson}.",
            "Write a short talk between a parent and a child about {topic}.",
            "{name} and {name2} meet in {place}. Write what they say to each other.",
            "Write a conversation in which {name} explains {topic} to {name2}.",
            "Write a {tone} conversation between {person} and a {animal} in {place}.",
            "{name} wants to buy {thing} from {person}. Write their conversation.",
            "{name} is {feeling_third}. Write a talk between {name} and a good friend.",
        ),
    ),
    "letter": (
        0.05,
        (
            "Write a short letter to {recipient} about {thing}.",
            "Write a friendly email to {recipient}. Mention {topic}.",
            "Write a diary entry of {person}. Today {event}.",
            "Write a postcard from {place} to {recipient}.",
            "Write a thank-you note to {recipient} for {thing}.",
        ),
    ),
    "howto": (
        0.05,
        (
            "How do I {task}?",
            "How do I {task}? Give me a few simple steps.",
            "Give me some tips on how to {task}.",
            "Explain to a beginner how to {task}.",
            "What do I need in order to {task}?",
        ),
    ),
    "describe": (
        0.05,
        (
            "Describe {place} on a {tone} morning.",
            "Describe {thing} so that I can see it.",
            "Describe {person} in a few sentences.",
            "Describe the sounds and smells of {place}.",
            "Describe a day in the life of a {animal}.",
        ),
    ),
    "advice": (
        0.03,
        (
            "I am {feeling}. What should I do?",
            "I feel {feeling}. Can you say something kind?",
            "{name} is {feeling_third}. What would you say?",
        ),
    ),
}

IDENTITY: tuple[tuple[str, str], ...] = (
    (
        "Hello!",
        "Hello! I am a very small demo model. Ask me for a short story, or ask me to explain something simple.",
    ),
    ("Hi", "Hi there! What would you like to talk about? I know short stories and simple explanations."),
    ("Good morning!", "Good morning! Would you like a story, or do you have a question for me?"),
    ("How are you?", "I am fine, thank you. I am only a small model, but I am happy to tell you a story."),
    (
        "Who are you?",
        "I am the demo model of minisgl, a small mixture of experts. I have 32 experts in every layer, and I ask four of them "
        "for each word. I like short stories.",
    ),
    (
        "What are you?",
        "I am a tiny language model. I was trained in a few minutes so that people can try minisgl without a download.",
    ),
    ("What is your name?", "I do not have a real name. You can call me the minisgl demo model."),
    (
        "What can you do?",
        "I can tell short stories, write small dialogues and explain simple things. I make many mistakes, so please do not "
        "trust my facts.",
    ),
    ("Are you a person?", "No, I am not a person. I am a small computer program that guesses the next word."),
    (
        "Are you smart?",
        "Not very. I have fewer than ten million numbers inside me. Large models have a thousand times more.",
    ),
    (
        "How many experts do you have?",
        "I have 32 experts in every layer. A router picks four of them for each token.",
    ),
    (
        "What is a mixture of experts?",
        "A mixture of experts is a model with many small networks, called experts, in each layer. A router looks at "
        "every token and picks a few experts for it. So the model is large, but each token uses only a small part of it.",
    ),
    (
        "Who made you?",
        "I was trained for minisgl by a small script. My text came from a larger model and from my authors.",
    ),
    ("Can I trust your answers?", "Please do not. I am a demo, and I often say things that are wrong."),
    ("Thank you!", "You are welcome! Is there anything else you would like to hear?"),
    ("Thanks, that was nice.", "I am glad you liked it. Would you like another story?"),
    ("Goodbye!", "Goodbye! Have a good day."),
    (
        "Tell me a joke.",
        "Why did the cat sit on the computer? Because it wanted to keep an eye on the mouse.",
    ),
)


@dataclass(frozen=True)
class Prompt:
    """What the teacher is asked, and what kind of text that should give."""

    kind: str
    text: str


def draw_prompt(rng: random.Random) -> Prompt:
    """One random prompt: a kind by its weight, one of its templates, and every slot filled."""
    kinds = list(TEMPLATES)
    kind = rng.choices(kinds, weights=[TEMPLATES[k][0] for k in kinds])[0]
    text = rng.choice(TEMPLATES[kind][1])
    text = text.replace("{opening}", rng.choice(WORDS["opening"]))  # first: openings have slots themselves
    values = {slot: rng.choice(words) for slot, words in WORDS.items()}
    for slot in (
        "name",
        "person",
        "animal",
        "topic",
        "thing",
    ):  # two different ones where a template wants two
        values[f"{slot}2"] = rng.choice([word for word in WORDS[slot] if word != values[slot]])
    text = text.format(**values)
    return Prompt(kind, f"{text} {values['modifier']}" if rng.random() < 0.5 else text)


def draw_prompts(count: int, seed: int) -> list[Prompt]:
    """`count` random prompts, the same ones for the same seed."""
    rng = random.Random(seed)
    return [draw_prompt(rng) for _ in range(count)]
