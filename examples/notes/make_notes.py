"""Makes the demo's data: short spoken-style notes about a purchase, each with the one JSON line it should become.

    python examples/notes/make_notes.py [--rows 400] [--held-out 60] [--seed 7] [--folder examples/notes]

writes train.jsonl and heldout.jsonl, one {"messages": [system, user, assistant]} a line; the same arguments give the
same bytes. Things and shops are put together from parts, so that the model has to copy rather than to remember, and
no part of a held-out thing, shop or sentence occurs in a training row. `score` is how the demo judges the answers.
"""
from __future__ import annotations

import argparse
import datetime
import json
import random
from pathlib import Path

SYSTEM = "Write the note as one line of JSON."
FIELDS = ("item", "shop", "amount", "currency", "date")


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


TRAIN = {
    "qualities": words("small, blue, wooden, used, heavy, folding, cheap, round, woollen, spare, steel, long, warm, "
                       "red, plastic, second-hand, light, square, soft, electric, copper, purple, leather, narrow, "
                       "bamboo, waterproof, grey, antique, cordless, striped, rubber, tall, portable, glass, dark, "
                       "padded"),
    "nouns": words("kettle, scarf, chair, mirror, drill, blanket, ladder, suitcase, pan, clock, bucket, hammer, "
                   "jacket, table, fan, cushion, bench, saddle, carpet, hose, brush, bowl, shelf, toaster, curtain, "
                   "violin, notebook, charger, webcam, monitor, helmet, pump, tripod, printer, wallet, hat, lantern, "
                   "bookcase, pillow, teapot, bicycle, raincoat, corkscrew, tent, wardrobe, whistle, calculator, "
                   "paddle, barbecue, sweater, thermometer, padlock, drum, flashlight, mattress, knife, oven, vase, "
                   "wheelbarrow, joystick, freezer, handbag, toothbrush, loudspeaker, hammock, screwdriver, armchair, "
                   "kite, trumpet, dishwasher"),
    "plain": words("coffee, lunch, fuel, parking, bread and cheese, a haircut, stamps, a bus pass, flowers, a taxi "
                   "ride, train tickets, two nights, bike repair, team dinner, green paint, four tyres, a swimming "
                   "lesson, dog food, apple juice, six mugs, garden soil, a phone bill, gloves, postcards, window "
                   "cleaning, a concert ticket, olive oil, translation work, a museum visit, fresh fish, printer "
                   "paper, batteries, headphones, envelopes, sunscreen, two sandwiches, firewood, popcorn, "
                   "toothpaste, seeds, candles"),
    "shop heads": words("Blue, Old, Nordlys, Green, Oscar's, Little, Volt, Royal, Lindholm, Sunny, North, Gusto, Red, "
                        "Marigold, Anna's, Urban, Polar, Quick, Falk, Iron, Rosa's, Delta, Hansen, Grand, Pelican, "
                        "Juniper, Otter, Cascade, Bergstrom, Willow, Tom's, Zephyr, Castle, Kingfisher, Amber, Lotus, "
                        "Fjord, Patel, Saffron, Comet, Brook, Nina's, Thistle, Walnut, Meridian, Osprey, Granite, "
                        "Lark, Valley, Dragon, Yilmaz, Cobalt, Hazel, Mountain, Panda, Winter, Clover, Bear, Quartz, "
                        "Magnolia"),
    "shop tails": words("Mill, Market, Kiosk, Books, Works, Garden, Station, Bakery, Supply, Inn, Leaf, Studio, "
                        "Tools, Corner, Lane, Electric, Brothers, Point, & Sons, Outlet, Pharmacy, Warehouse, Goods, "
                        "Cafe"),
    "sentences": [
        "Paid {price} for {item} at {shop} on {date}.", "{item} from {shop}, {price}, {date}",
        "On {date} I bought {item} at {shop} for {price}.", "{shop}: {item}, {price} ({date})",
        "I spent {price} on {item} on {date}, {shop}.", "{date} - {item} - {shop} - {price}",
        "Got {item} at {shop}. It was {price}, on {date}.", "Please book {price} for {item}, {shop}, {date}.",
        "{date}: {price} to {shop} for {item}", "We picked up {item} at {shop} on {date}; the bill was {price}.",
        "Receipt from {shop} dated {date}: {item} {price}.", "hi, can you file {item}? {shop}, {date}, {price}, thanks",
        "{price} went to {shop}, {date}, because we needed {item}.", "For the books: {item}. {date}. {shop}. {price}.",
    ],
}
HELD_OUT = {
    "qualities": words("large, yellow, cotton, new, strong, quiet, thin, silver"),
    "nouns": words("umbrella, router, lamp, keyboard, camera, basket, sofa, guitar, backpack, microphone"),
    "plain": words("breakfast, three pizzas, a boat trip, business cards, car rental, ice cream, a first aid kit"),
    "shop heads": words("Seven, Ocean, Bright, Crystal, Harbour, Stone, Emma's, Eagle"),
    "shop tails": words("House, Hall, Depot, Trading, Bridge, Foods"),
    "sentences": [
        "{shop} charged me {price} on {date} for {item}.",
        "My card shows {price} at {shop} on {date}, that was {item}.",
        "Another one: {item}, cost {price} at {shop}, day was {date}.", "{item} cost {price}. Bought {date} at {shop}.",
    ],
}
PRICES = {
    "EUR": ["{} euros", "{} EUR", "€{}"], "USD": ["{} dollars", "${}", "{} USD"],
    "GBP": ["£{}", "{} pounds", "{} GBP", "{} pounds"], "JPY": ["{} yen", "¥{}", "{} JPY"],
    "SEK": ["{} kronor", "{} SEK", "{} Swedish kronor"], "CHF": ["{} francs", "{} CHF", "{} Swiss francs"],
}
DATES = ["{d} {month} {y}", "{month} {d}, {y}", "{month} {nth}, {y}", "the {nth} of {month} {y}", "{d}.{m}.{y}",
         "{d} {short} {y}"]
HARD_DATES = ["{d}.{m}.{y}", "the {nth} of {month} {y}"]  # every digit is a token: worth a larger share of the training


def ordinal(number: int) -> str:
    ending = "th" if 10 <= number <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def make_row(rng: random.Random, parts: dict[str, list[str]]) -> dict:
    """One conversation: the note with everything in it, and its JSON line (an item loses its article)."""
    if rng.random() < 0.35:
        article, _, rest = (item := rng.choice(parts["plain"])).partition(" ")
        name = rest if article == "a" else item
    else:
        name = rng.choice(parts["nouns"])
        name = f"{rng.choice(parts['qualities'])} {name}" if rng.random() < 0.7 else name
        item = f"{'an' if name[0] in 'aeiou' and name[:4] != 'used' else 'a'} {name}"
    shop = rng.choice(parts["shop heads"]) + (f" {rng.choice(parts['shop tails'])}" if rng.random() < 0.8 else "")
    currency = rng.choice(sorted(PRICES))
    amount: float = rng.randint(2, 600) * (50 if currency == "JPY" else 1)
    shown = str(amount)
    if currency != "JPY" and rng.random() < 0.5:
        cents = rng.randint(200, 60000)
        amount, shown = cents / 100, f"{cents // 100}.{cents % 100:02d}"
    day = datetime.date(2023, 1, 1) + datetime.timedelta(days=rng.randrange(4 * 365))
    form = rng.choice(DATES if parts is HELD_OUT else DATES + HARD_DATES)
    date = form.format(d=day.day, m=day.month, y=day.year, month=f"{day:%B}", short=f"{day:%b}", nth=ordinal(day.day))
    note = rng.choice(parts["sentences"]).format(item=item, shop=shop, date=date,
                                                 price=rng.choice(PRICES[currency]).format(shown))
    answer = dict(zip(FIELDS, (name, shop, amount, currency, day.isoformat()), strict=True))
    return {"messages": [{"role": "system", "content": SYSTEM},
                         {"role": "user", "content": note[0].upper() + note[1:]},
                         {"role": "assistant", "content": json.dumps(answer, ensure_ascii=False)}]}


def make_rows(count: int, seed: int, held_out: bool = False) -> list[dict]:
    rng = random.Random(f"{seed} {'held out' if held_out else 'train'}")
    return [make_row(rng, HELD_OUT if held_out else TRAIN) for _ in range(count)]


def score(outputs: list[str], rows: list[dict]) -> dict[str, float]:
    """Shares over `rows`, 0 to 1: `valid` (one JSON object, just the five keys), `fields` right, `notes` wholly right.

    outputs: the model's answers, one a row. An amount counts as right when the numbers are equal.
    """
    if len(outputs) != len(rows):
        raise ValueError(f"{len(outputs)} outputs for {len(rows)} rows")
    valid = fields = notes = 0
    for output, row in zip(outputs, rows, strict=True):
        wanted = json.loads(row["messages"][-1]["content"])
        try:
            got = json.loads(output)
        except ValueError:
            continue
        if not isinstance(got, dict):
            continue
        right = sum(key in got and got[key] == wanted[key] for key in FIELDS)
        whole = set(got) == set(FIELDS)
        valid, fields, notes = valid + whole, fields + right, notes + (whole and right == len(FIELDS))
    return {"valid": valid / len(rows), "fields": fields / len(rows) / len(FIELDS), "notes": notes / len(rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--held-out", type=int, default=60)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent)
    arguments = parser.parse_args()
    for name, count, held_out in (("train", arguments.rows, False), ("heldout", arguments.held_out, True)):
        lines = [json.dumps(row, ensure_ascii=False) for row in make_rows(count, arguments.seed, held_out)]
        (arguments.folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
