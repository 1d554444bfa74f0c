"""Which batch the ledger holds, whatever was looked for before."""

from areal_async.core.ledger import Group, Ledger
from areal_async.messages import Rules


def go(ledger: Ledger, group: Group, *states: str) -> None:
    for state in states:
        ledger.move_group(group, state, 0.0)


def test_a_batch_that_was_refused_may_be_formed_when_another_group_leaves_or_is_ready() -> None:
    rules = Rules(
        seed=1, steps=9, batch_groups=1, group_size=1, max_staleness=1, max_concurrent=9, minibatches=1, ranks=1,
        max_tokens_per_microbatch=64, max_new_tokens=8,
    )  # fmt: skip
    ledger = Ledger(rules)
    groups = [ledger.admit(position, "0", 0, 0, 0.0) for position in range(4)]  # all of them by step 1
    go(ledger, groups[3], "running", "scored", "ready")
    assert ledger.choose_batch() == []
    assert ledger.choose_batch() == []
    go(ledger, groups[0], "failed")
    assert ledger.choose_batch() == [], "two stay behind, and one step is left"
    go(ledger, groups[1], "running", "scored", "filtered")
    assert ledger.choose_batch() == [groups[3]]
    ledger.hand_over([groups[3]], 0.0)
    assert ledger.choose_batch() == []
    go(ledger, groups[2], "running", "scored", "ready")
    assert ledger.choose_batch() == [groups[2]]
