"""Run tasks on a Celery worker, and print their results."""

from __future__ import annotations

from celery import chord, group
from tasks import add, app, flaky, total

print(add.delay(2, 3).get(timeout=20))
print(flaky.delay().get(timeout=20))
print(sorted(group(add.s(number, 1) for number in range(3))().get(timeout=20)))
print(chord([add.s(number, number) for number in range(5)])(total.s()).get(timeout=20))
print([list(answer.values()) for answer in app.control.ping(timeout=2)])
