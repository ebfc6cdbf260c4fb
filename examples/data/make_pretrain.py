"""Makes the pre-training text beside this file: python examples/data/make_pretrain.py

Small tales, letters, recipes and counting lessons, English and some Chinese, all our own: sentences around a few
tables, by one fixed seed, so the same on every machine. Who is where with what stays true within a text, so that a
tiny model has something to learn besides spelling.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

HERE = Path(__file__).resolve().parent
TRAIN, EVAL = 620, 24  # documents

PEOPLE = ["Ada", "Bela", "Chen", "Dora", "Emil", "Farah", "Goran", "Hana", "Ivo", "Jun", "Kofi", "Lena", "Mira", "Noor"]
WORK = ["a baker", "a potter", "a ferryman", "a teacher", "a clockmaker", "a gardener", "a fisher", "a weaver"]
PLACES = ["the harbour", "the mill", "the old bridge", "the market", "the lighthouse", "the orchard", "the library"]
THINGS = ["a brass key", "a blue jar", "a paper kite", "a round loaf", "a small drum", "a wooden boat", "a red scarf"]
WEATHER = {"rain": "the streets were wet", "wind": "the doors would not stay shut", "snow": "nobody could see the path",
           "fog": "the boats stayed in", "sun": "the stones were warm"}  # fmt: skip
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
BEASTS = {"bee": ("six", "lives in a hive"), "spider": ("eight", "spins a web"), "horse": ("four", "sleeps standing"),
          "crab": ("ten", "walks sideways"), "goose": ("two", "flies in a wedge"), "ant": ("six", "carries crumbs"),
          "cat": ("four", "lands on its feet"), "duck": ("two", "keeps its feathers dry")}  # fmt: skip
DISHES = {"barley soup": ["barley", "carrots", "salt"], "apple pie": ["apples", "flour", "butter"],
          "rice cakes": ["rice", "sugar", "sesame"], "bean stew": ["beans", "onions", "pepper"],
          "flat bread": ["flour", "water", "salt"]}  # fmt: skip
PEOPLE_ZH = ["小明", "小红", "阿宝", "小兰", "大成", "小雨"]
PLACES_ZH = ["河边", "山上", "学校", "市场", "桥头", "图书馆"]
THINGS_ZH = ["一把伞", "一本书", "一个苹果", "一盏灯", "一只风筝", "一壶茶"]
WEATHER_ZH = {"下雨": "路上很湿", "刮风": "树叶满地", "下雪": "屋顶都白了", "晴天": "石头很暖"}


def tale(r: random.Random) -> str:
    """Something is lost, carried about, and found where it was left."""
    (who, other), work, (here, there) = r.sample(PEOPLE, 2), r.choice(WORK), r.sample(PLACES, 2)
    thing, (sky, so) = r.choice(THINGS), r.choice([*WEATHER.items()])
    bare, day = thing.split(" ", 1)[1], r.randrange(7)
    parts = [
        f"{who} was {work} who lived near {here}.",
        f"On {DAYS[day]} there was {sky}, and {so}.",
        f"{who} took {thing} and walked from {here} to {there}.",
        r.choice([f"At {there} {other} was waiting.", f"{other} was already at {there}."]),
        f'"What do you have there?" asked {other}. "It is {thing}," said {who}. "I carried it from {here}."',
    ]
    if r.random() < 0.5:
        parts.append(f"{who} gave the {bare} to {other}, and {other} took it home.")
        parts.append(f"On {DAYS[(day + 1) % 7]} the {bare} was still with {other}.")
    else:
        parts.append(f"{who} forgot the {bare} at {there} and went home without it.")
        parts.append(f"On {DAYS[(day + 1) % 7]} {who} came back to {there}, and there the {bare} was.")
    return " ".join(parts)


def letter(r: random.Random) -> str:
    (who, to), place, (sky, so) = r.sample(PEOPLE, 2), r.choice(PLACES), r.choice([*WEATHER.items()])
    count = r.randrange(2, 10)
    return (
        f"Dear {to},\nI write to you from {place}. We have had {sky} for {NUMBERS[count]} days now, and {so}. "
        f"After {NUMBERS[count]} days of {sky} one learns to be patient. {r.choice(PEOPLE)} says it will be over by "
        f"{r.choice(DAYS)}. Please write soon, {to}, and tell me how it is where you are.\nYours, {who}"
    )


def recipe(r: random.Random) -> str:
    dish, needs = r.choice([*DISHES.items()])
    order, many = r.sample(needs, 3), r.randrange(2, 13)
    return (
        f"How to make {dish}. For {NUMBERS[many]} people you need {needs[0]}, {needs[1]} and {needs[2]}. "
        f"Begin with the {order[0]}. Then add the {order[1]}, and last of all the {order[2]}. "
        f"Wait {r.choice(['an hour', 'half an hour', 'until evening'])}, and there is {dish} for {NUMBERS[many]}."
    )


def counting(r: random.Random) -> str:
    start, step = r.randrange(0, 30), r.choice([1, 2, 3, 5, 10])
    count = r.randrange(5, 12)
    run = [start + step * k for k in range(count)]
    sums = [f"{a} + {step} = {a + step}." for a in run[:-1]]
    return f"Counting by {step} from {start}: {', '.join(map(str, run))}. " + " ".join(sums[: r.randrange(2, 6)])


def beast(r: random.Random) -> str:
    one, two = r.sample([*BEASTS], 2)
    legs = {name: BEASTS[name][0] for name in (one, two)}
    more = "as many legs as" if legs[one] == legs[two] else "not as many legs as"
    return (
        f"The {one} has {legs[one]} legs and {BEASTS[one][1]}. The {two} has {legs[two]} legs and {BEASTS[two][1]}. "
        f"So the {one} has {more} the {two}. A {one} is not a {two}."
    )


def week(r: random.Random) -> str:
    who, day = r.choice(PEOPLE), r.randrange(7)
    plan = r.sample(PLACES, 4)
    told = [f"On {DAYS[(day + k) % 7]} {who} goes to {place}." for k, place in enumerate(plan)]
    back = r.randrange(4)
    return f"The week of {who}. {' '.join(told)} When is {who} at {plan[back]}? On {DAYS[(day + back) % 7]}."


def tale_zh(r: random.Random) -> str:
    (who, other), (here, there) = r.sample(PEOPLE_ZH, 2), r.sample(PLACES_ZH, 2)
    thing, (sky, so) = r.choice(THINGS_ZH), r.choice([*WEATHER_ZH.items()])
    ends = r.choice([f"{who}把{thing[2:]}送给了{other}。", f"{who}把{thing[2:]}忘在了{there}，第二天又回来拿。"])
    return f"今天{sky}，{so}。{who}带着{thing}，从{here}走到{there}。{other}在{there}等他。{ends}"


KINDS = [tale, tale, tale, letter, recipe, counting, beast, week, tale_zh]


def documents() -> list[str]:
    """All texts, none twice; a quarter of them are chapters of several."""
    r = random.Random("erniekit/pretrain")
    out: dict[str, None] = {}
    while len(out) < TRAIN + EVAL:
        kind = r.choice(KINDS)
        chapters = r.randrange(2, 5) if r.random() < 0.25 else 1
        out["\n".join(kind(r) for _ in range(chapters))] = None
    return [*out]


def files() -> dict[Path, str]:
    """Every file this makes, with its text."""
    rows = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents()]
    return {HERE / "pretrain.jsonl": "".join(rows[:TRAIN]), HERE / "pretrain-eval.jsonl": "".join(rows[TRAIN:])}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
        print(f"{text.count(chr(10)):4} documents, {len(text.encode()) >> 10} KiB  {path.relative_to(HERE.parents[1])}")
