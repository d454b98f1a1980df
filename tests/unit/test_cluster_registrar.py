"""How a node enters and stays: answers and times in, what to do next out."""

import math

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvpool.cluster.registrar import PAUSE_S, Command, Registrar

TTL_S = 3


def entered() -> Registrar:
    one = Registrar(TTL_S)
    one.granted(7, TTL_S, 10.0)
    one.entered(5)
    return one


def test_from_nothing_to_a_lease_that_is_kept() -> None:
    one = Registrar(TTL_S)
    assert one.due() == (Command.GRANT, -math.inf)
    one.granted(7, TTL_S, 10.0)
    assert one.due() == (Command.ENTER, 10.0)
    assert not one.is_held(10.1)
    one.entered(5)
    assert one.due() == (Command.KEEP, 11.0)
    assert one.is_held(12.9)
    assert not one.is_held(13.0)
    one.kept(TTL_S, 11.5)
    assert one.due() == (Command.KEEP, 12.5)
    assert one.is_held(14.4)


def test_silence_proves_nothing_and_is_asked_again_slower() -> None:
    one = entered()
    pauses = []
    now = 11.0
    for _ in range(10):
        one.failed(Command.KEEP, now)
        command, at = one.due()
        assert (command, one.lease) == (Command.KEEP, 7)
        pauses.append(at - now)
        now = at
    assert abs(pauses[0] - PAUSE_S) < 1e-9
    assert pauses == sorted(pauses)
    assert abs(pauses[-1] - TTL_S / 3) < 1e-9


def test_a_lease_that_is_gone_is_asked_for_at_once() -> None:
    one = entered()
    one.kept(0, 12.0)
    assert one.due() == (Command.GRANT, 12.0)
    assert not one.is_held(12.0)


def test_an_entry_that_is_refused_does_not_cost_the_lease() -> None:
    one = Registrar(TTL_S)
    one.granted(7, TTL_S, 10.0)
    now = 10.0
    commands = []
    for _ in range(40):
        command, at = one.due()
        now = max(now, at)
        commands.append(command)
        if command is Command.ENTER:
            one.failed(Command.ENTER, now)
        else:
            one.kept(TTL_S, now)
    assert Command.GRANT not in commands
    assert commands.count(Command.KEEP) > 10


def test_refused_again_and_again_by_a_lease_that_is_gone_it_slows_down() -> None:
    one = Registrar(TTL_S)
    now = 0.0
    for _ in range(12):
        one.granted(7, TTL_S, now)
        one.gone(now)
        one.failed(Command.ENTER, now)
        now = one.due()[1]
    assert one.due() == (Command.GRANT, now)
    one.granted(8, TTL_S, now)
    one.gone(now)
    one.failed(Command.ENTER, now)
    assert abs(one.due()[1] - now - TTL_S / 3) < 1e-9


def test_what_changed_is_put_again_under_the_same_lease() -> None:
    one = entered()
    one.changed()
    assert one.due()[0] is Command.ENTER
    assert one.is_held(11.0)
    one.entered(9)
    assert one.due()[0] is Command.KEEP


def test_a_read_that_is_older_than_the_entry_does_not_miss_it() -> None:
    one = entered()
    one.missing(4)
    assert one.due()[0] is Command.KEEP
    one.missing(5)
    assert one.due()[0] is Command.ENTER
    assert one.lease == 7


def test_who_is_replaced_does_nothing_more() -> None:
    one = entered()
    one.replaced()
    assert one.due() == (None, math.inf)
    assert not one.is_held(10.0)


class AgainstEtcd(RuleBasedStateMachine):
    """An etcd with leases that run out; answers that come late or not at all.

    Whatever happens, is_held() is never true when etcd has no entry of ours.
    """

    def __init__(self) -> None:
        super().__init__()
        self.one = Registrar(TTL_S)
        self.now = 0.0
        self.leases: dict[int, float] = {}  # when each runs out
        self.entry: int | None = None  # the lease that it is under
        self.revision = 0

    @rule(
        takes=st.floats(0, 2),
        is_lost=st.sampled_from(["no", "no", "no", "request", "answer"]),
    )
    def step(self, takes: float, is_lost: str) -> None:
        command, at = self.one.due()
        self.now = max(self.now, at)
        sent = self.now
        self.pass_time(takes / 2)
        answer = self.etcd(command) if is_lost != "request" else None
        self.pass_time(takes / 2)
        if answer is None or is_lost == "answer":
            self.one.failed(command, self.now)
        elif command is Command.GRANT:
            self.one.granted(answer, TTL_S, sent)
        elif command is Command.ENTER:
            if answer > 0:
                self.one.entered(answer)
            else:
                self.one.gone(self.now)
                self.one.failed(command, self.now)
        else:
            self.one.kept(answer, sent)

    def etcd(self, command: Command) -> int:
        self.revision += 1
        if command is Command.GRANT:
            self.leases[self.revision] = self.now + TTL_S
            return self.revision
        lease = self.one.lease
        assert lease is not None
        if lease not in self.leases:
            return 0
        if command is Command.ENTER:
            self.entry = lease
            return self.revision
        self.leases[lease] = self.now + TTL_S
        return TTL_S

    @rule(seconds=st.floats(0, 4))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for lease in [each for each, at in self.leases.items() if at <= self.now]:
            del self.leases[lease]
            self.entry = None if self.entry == lease else self.entry

    @invariant()
    def held_is_true(self) -> None:
        if self.one.is_held(self.now):
            assert self.entry is not None


TestAgainstEtcd = AgainstEtcd.TestCase
