"""Who runs in the next step, without a model."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offset_runtime.scheduler import Scheduler


@dataclass(eq=False)
class Item:
    prompt: int
    reply: int = 4
    fed: int = 0
    background: bool = False
    ready: bool = True
    produced: int = 0

    @property
    def pending_tokens(self) -> int:
        return self.prompt + self.produced - self.fed

    @property
    def reserved_tokens(self) -> int:
        return self.prompt + self.reply

    def advance(self, tokens: int) -> None:
        self.fed += tokens
        if self.pending_tokens == 0:
            self.produced += 1

    @property
    def done(self) -> bool:
        return self.produced == self.reply


def scheduler(items: list[Item], **settings: int | bool | None) -> Scheduler[Item]:
    made: Scheduler[Item] = Scheduler(**{"max_running": 4, "max_step_tokens": 8, **settings})  # type: ignore[arg-type]
    for item in items:
        made.add(item)
    return made


def test_requests_are_admitted_in_order_of_arrival_up_to_max_running() -> None:
    items = [Item(1) for _ in range(6)]
    queue = scheduler(items, max_running=4)
    assert list(queue.admit()) == items[:4]
    assert list(queue.admit()) == []
    queue.remove(items[1])
    assert list(queue.admit()) == [items[4]]


def test_decode_steps_come_before_prefill_and_prompts_are_cut_to_the_budget() -> None:
    decoding, long, late = Item(5, fed=5, produced=1), Item(20), Item(3)
    queue = scheduler([long, late, decoding])
    list(queue.admit())
    assert queue.plan() == [(decoding, 1), (long, 7)]


def test_the_budget_left_by_one_prompt_goes_to_the_next() -> None:
    first, second, third = Item(3), Item(4), Item(9)
    queue = scheduler([first, second, third])
    list(queue.admit())
    assert queue.plan() == [(first, 3), (second, 4), (third, 1)]


def test_whole_prompts_wait_for_a_step_with_room() -> None:
    first, second = Item(5), Item(6)
    queue = scheduler([first, second], split_prefill=False)
    list(queue.admit())
    assert queue.plan() == [(first, 5)]


def test_a_whole_prompt_beyond_the_budget_runs_beside_decode_steps_and_no_other_prompt() -> None:
    decoding, long, short = Item(5, fed=5, produced=1), Item(50), Item(2)
    queue = scheduler([decoding, long, short], split_prefill=False)
    list(queue.admit())
    assert queue.plan() == [(decoding, 1), (long, 50)]


def test_more_decode_steps_than_the_budget_all_run() -> None:
    items = [Item(2, fed=2, produced=1) for _ in range(4)]
    queue = scheduler(items, max_step_tokens=2)
    list(queue.admit())
    assert queue.plan() == [(item, 1) for item in items]


def test_capacity_is_reserved_for_prompt_and_reply_and_the_order_is_kept() -> None:
    big, bigger, small = Item(6), Item(10), Item(1)
    queue = scheduler([big, bigger, small], kv_capacity_tokens=16)
    assert list(queue.admit()) == [big]
    # The small one would fit, but must not overtake for ever.
    assert list(queue.admit()) == []
    queue.remove(big)
    assert list(queue.admit()) == [bigger]


def test_removing_forgets_running_and_waiting_requests_and_nothing_twice() -> None:
    items = [Item(1) for _ in range(6)]
    queue = scheduler(items)
    list(queue.admit())
    for item in (items[0], items[5], items[5]):
        queue.remove(item)
    assert queue.running == items[1:4]
    assert list(queue.waiting) == [items[4]]


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 5)), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(1, 12),
    st.booleans(),
    st.none() | st.integers(35, 80),
)
def test_every_request_ends_within_the_limits(
    sizes: list[tuple[int, int]], max_running: int, max_step_tokens: int, split: bool, capacity: int | None
) -> None:
    items = [Item(prompt, reply) for prompt, reply in sizes]
    queue = scheduler(
        items,
        max_running=max_running,
        max_step_tokens=max_step_tokens,
        split_prefill=split,
        kv_capacity_tokens=capacity,
    )
    for _ in range(10_000):
        if not (queue.running or queue.waiting):
            break
        list(queue.admit())
        plan = queue.plan()
        assert plan, "requests run, but no step is planned"
        assert len({id(item) for item, _ in plan}) == len(plan) <= max_running
        assert all(1 <= tokens <= item.pending_tokens for item, tokens in plan)
        prompts = [tokens for item, tokens in plan if item.pending_tokens > 1]
        if split:
            assert sum(prompts) <= max_step_tokens
        else:
            assert sum(prompts) <= max_step_tokens or len(prompts) == 1
        if capacity is not None:
            assert sum(item.reserved_tokens for item in queue.running) <= capacity
        for item, tokens in plan:
            item.advance(tokens)
            if item.done:
                queue.remove(item)
    assert all(item.done for item in items)


@pytest.mark.parametrize("split", [True, False])
def test_a_long_prompt_is_not_starved_by_a_stream_of_short_ones(split: bool) -> None:
    long = Item(40)
    queue = scheduler([Item(1, reply=3), Item(1, reply=3), long], max_running=3, split_prefill=split)
    for _ in range(60):
        queue.add(Item(1, reply=3))
        list(queue.admit())
        for item, tokens in queue.plan():
            item.advance(tokens)
            if item.done:
                queue.remove(item)
    assert long.done


def test_work_in_the_background_starts_only_where_nothing_waits_or_runs_and_one_at_a_time() -> None:
    background = [Item(2, reply=1, background=True) for _ in range(2)]
    item = Item(2, reply=1)
    queue = scheduler([*background, item], max_running=4)

    assert list(queue.admit()) == [item]
    assert list(queue.admit()) == []
    queue.remove(item)
    assert list(queue.admit()) == background[:1]
    late = Item(2)
    queue.add(late)
    assert list(queue.admit()) == [late], "beside the one that runs already"
    for running in (background[0], late):
        queue.remove(running)
    assert list(queue.admit()) == background[1:]


def test_work_in_the_background_can_be_removed_before_it_starts() -> None:
    item = Item(2, background=True)
    queue = scheduler([item])
    assert queue.open == [item]
    queue.remove(item)
    assert queue.open == []
    assert list(queue.admit()) == []


def test_work_in_the_background_gets_what_the_others_leave_of_a_step() -> None:
    background, item = Item(20, background=True), Item(6)
    queue = scheduler([background], max_running=4)
    list(queue.admit())
    queue.add(item)
    list(queue.admit())
    assert queue.plan() == [(item, 6), (background, 2)]
