"""Text full of numbers: made-up records, lists, logs and letters that refer to each other's numbers.

Prose and manuals hold few digits, and maps fitted on them alone tell one digit from another badly: what a key says of
the digit before it is learnt from rows like these. Written from a seed; nothing in it is real.
"""
from __future__ import annotations

import random
from collections.abc import Callable

STREETS = ["Mill Lane", "Harbour Road", "North Street", "Elm Avenue", "Station Road", "Castle Hill", "Garden Row"]
GOODS = ["lamp oil", "roof tiles", "copper wire", "seed potatoes", "window glass", "paper reels", "ball bearings", "floor wax"]
TOWNS = ["Ashby", "Corwen", "Dunmore", "Elstow", "Farnham", "Glossop", "Hexham", "Kendal", "Ludlow", "Morpeth"]
STATES = ["open", "paid", "returned", "in transit", "on hold", "closed"]
UNITS = ["kg", "m", "litres", "crates", "hours", "km"]


def digits(r: random.Random, low: int = 3, high: int = 9) -> str:
    """A number of `low` to `high` digits."""
    n = r.randint(low, high)
    return str(r.randrange(10 ** (n - 1), 10**n))


def date(r: random.Random) -> str:
    return f"{r.randint(1950, 2024)}-{r.randint(1, 12):02d}-{r.randint(1, 28):02d}"


def clock(r: random.Random) -> str:
    return f"{r.randrange(24):02d}:{r.randrange(60):02d}:{r.randrange(60):02d}"


def orders(r: random.Random) -> str:
    numbers = [digits(r, 5, 8) for _ in range(6)]
    rows = [f"Order {n}: {r.randint(2, 900)} {r.choice(UNITS)} of {r.choice(GOODS)}, {r.choice(STATES)}." for n in numbers]
    asked = r.choice(numbers)
    return "\n".join(rows) + f"\nThe customer asked for order {asked}. We have looked up order {asked} and will write again."


def table(r: random.Random) -> str:
    head = "town,postcode,households,reading,date"
    rows = [f"{r.choice(TOWNS)},{digits(r, 5, 5)},{digits(r, 3, 5)},{digits(r, 2, 4)}.{digits(r, 1, 3)},{date(r)}" for _ in range(8)]
    return "\n".join([head, *rows])


def log(r: random.Random) -> str:
    job, day = digits(r, 4, 7), date(r)
    lines = [f"{day} {clock(r)} job {job} step {i} took {digits(r, 1, 5)} ms, {digits(r, 2, 8)} bytes" for i in range(1, 7)]
    return "\n".join(lines) + f"\n{day} {clock(r)} job {job} done"


def phones(r: random.Random) -> str:
    return "\n".join(f"{r.choice(STREETS)} {r.randint(1, 200)}, {r.choice(TOWNS)}: telephone {digits(r, 6, 8)}" for _ in range(6))


def settings(r: random.Random) -> str:
    names = ["port", "limit", "seed", "timeout", "user_id", "chunk", "offset", "revision"]
    return "\n".join(f"{name} = {digits(r, 1, 8)}" for name in r.sample(names, 6))


def letter(r: random.Random) -> str:
    account, sum_due = digits(r, 7, 9), f"{digits(r, 2, 4)}.{r.randrange(100):02d}"
    return (
        f"Dear customer, your account {account} shows a balance of {sum_due}. Please pay {sum_due} by {date(r)} and give the "
        f"account number {account} with it. Our office in {r.choice(TOWNS)} answers under {digits(r, 6, 8)}."
    )


def stock(r: random.Random) -> str:
    shelves = [f"Shelf {r.choice('ABCDEFGH')}{r.randint(1, 99)} holds {digits(r, 2, 4)} {r.choice(UNITS)} of {r.choice(GOODS)}, batch {digits(r, 6, 8)}." for _ in range(5)]
    return " ".join(shelves)


def sums(r: random.Random) -> str:
    pairs = [(r.randrange(10**4), r.randrange(10**4)) for _ in range(6)]
    return "\n".join(f"{a} + {b} = {a + b}" for a, b in pairs)


PARTS: list[Callable[[random.Random], str]] = [orders, table, log, phones, settings, letter, stock, sums]


def document(seed: int, n_chars: int) -> str:
    """About n_chars characters, whole parts."""
    r, parts, length = random.Random(seed), [], 0
    while length < n_chars:
        parts.append(r.choice(PARTS)(r))
        length += len(parts[-1]) + 2
    return "\n\n".join(parts) + "\n"
