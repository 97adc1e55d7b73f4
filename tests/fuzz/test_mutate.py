"""Test the mutations: each can change each value, also one that a mutation has written before."""

import json
import random

from mutate import HUGE, NOTHING, TEXTS, another, mutate_json


def test_every_value_can_be_changed() -> None:
    for value in (*HUGE, *TEXTS, *NOTHING):
        for seed in range(200):
            json.dumps(another(value, random.Random(seed)))
    text = json.dumps([*HUGE, *TEXTS, *NOTHING]).encode()
    for seed in range(200):
        mutate_json(mutate_json(text, random.Random(seed)), random.Random(seed + 1))
