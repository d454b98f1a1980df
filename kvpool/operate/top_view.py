"""What `kvpool top` shows: samples in, a frame of a given size out. The same for every terminal.

Promises:  1. a frame is never wider or higher than asked, from WIDTH_MIN x HEIGHT_MIN on;
           2. while there is no daemon the last frame stays, with the reason on top;
           3. memory is bounded: HISTORY_MAX hit rates.
Pure but for the state of one Top; one thread at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvpool.observe.report import Client, Dram, Report, Ssd, Tenant, total
from kvpool.operate.client import Hot
from kvpool.operate.feed import Flow, Lost, Sample, flow
from kvpool.operate.show import bar, clean, count, duration, percent, rate, size, sparkline, table

WIDTH_MIN, HEIGHT_MIN = 60, 16
HISTORY_MAX = 600
_BAR_WIDTH = 20
_KEY_DIGITS = 8
_NAME_COLUMNS = 20  # of a namespace

_AIRY_HEIGHT = 32  # from there on, a blank line above each table
_TABLE_LINES = 3  # of a table without rows: title, names, rule

SORTS = ("heat", "depth", "idle")
KEYS = {
    "q": "quit",
    "p": "pause",
    "s": "sort",
    "t": "tenant",
    "?": "help",
}
HELP = (
    "q  leave",
    "p  hold the picture still, or let it go on",
    "s  sort prefixes by heat, depth or idle time; clients are by what they load",
    "t  show one tenant after the other, then all of them",
    "?  this help",
    "",
    "hit     of the blocks that lookups asked for, those that were there",
    "heat    uses of a prefix, older ones counting for less; the hottest stay",
    "depth   blocks of the prefix up to its end",
    "kids    blocks that go on from it",
)


class Top:
    """The state of one screen."""

    def __init__(self) -> None:
        """Empty: render() says that it waits."""
        self.is_paused = False
        self.is_helping = False
        self.sort = SORTS[0]
        self.tenant: str | None = None  # None: all of them
        self._sample: Sample | None = None
        self._lost: Lost | None = None
        self._rates: deque[float | None] = deque(maxlen=HISTORY_MAX)

    # --- what happens ----------------------------------------------------------------------------

    def feed(self, news: Sample | Lost) -> None:
        """Takes what a Feed gave. While paused only the history goes on."""
        if isinstance(news, Lost):
            self._lost = news
            self._rates.append(None)
            return
        self._lost = None
        self._rates.append(_flow_of(news, self.tenant).hit_ratio)
        if not self.is_paused:
            self._sample = news

    def press(self, key: str) -> bool:
        """A key was pressed; False: leave. Keys that mean nothing do nothing."""
        if key == "p":
            self.is_paused = not self.is_paused
        elif key == "s":
            self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
        elif key == "t":
            self._next_tenant()
        elif key == "?":
            self.is_helping = not self.is_helping
        return key != "q"

    def _next_tenant(self) -> None:
        names = [] if self._sample is None else [each.name for each in self._sample.report.tenants]
        choices: list[str | None] = [None, *names]
        at = choices.index(self.tenant) if self.tenant in choices else 0
        self.tenant = choices[(at + 1) % len(choices)]
        self._rates.clear()  # they were of others

    # --- what is seen ----------------------------------------------------------------------------

    def render(self, width: int, height: int) -> RenderableType:
        """One frame."""
        width, height = max(width, WIDTH_MIN), max(height, HEIGHT_MIN)
        return Group(*_clipped(self._lines(width, height), width, height))

    def _lines(self, width: int, height: int) -> Iterator[RenderableType]:
        yield self._head()
        if self._lost is not None:
            yield Text(clean(" ".join(self._lost.reason.split())), style="bold red")
        if self.is_helping:
            yield from (Text(line) for line in ("", *HELP))
            return
        sample = self._sample
        if sample is None:
            if self._lost is None:
                yield Text("waiting for the first report")
            return
        tenants = self._shown(sample.report)
        yield from _tier_lines(tenants, width)
        yield from self._flow_lines(sample, tenants, width)
        used = 4 + (self._lost is not None) + any(each.ssd for each in tenants)
        gap = "\n" if height >= _AIRY_HEIGHT else ""
        yield from self._tables(sample, tenants, height - used, gap)

    def _head(self) -> Text:
        if self._sample is None:
            return Text("kvpool top", style="bold")
        report = self._sample.report
        up = duration(report.now_s - report.started_s)
        state = "" if report.is_ready else ", not ready"
        head = Text(f"kvpool {report.version}, pid {report.pid}, up {up}{state}", style="bold")
        head.append(f"  tenant {self.tenant or 'all'}, by {self.sort}", style="not bold")
        if self.is_paused:
            head.append("  paused", style="bold yellow")
        head.append("  ? help", style="dim")
        return head

    def _shown(self, report: Report) -> list[Tenant]:
        if self.tenant is None:
            return report.tenants
        return [each for each in report.tenants if each.name == self.tenant]

    def _flow_lines(self, sample: Sample, tenants: Sequence[Tenant], width: int) -> Iterator[Text]:
        now = _flow_of(sample, self.tenant)
        whole = total(each.traffic for each in tenants)
        ratio = whole.hit_ratio()
        since = "-" if ratio is None else f"{ratio:.0%}"
        parts = f"DRAM {percent(whole.hit_dram, whole.requested)}, " + (
            f"SSD {percent(whole.hit_ssd, whole.requested)}"
        )
        if whole.hit_remote:
            parts += f", other nodes {percent(whole.hit_remote, whole.requested)}"
        latest = "-" if now.hit_ratio is None else f"{now.hit_ratio:.0%}"
        told = f" {latest} now, {since} since start ({parts})"
        line = Text("hit   ")
        line.append(sparkline(list(self._rates), max(8, width - len(told) - 6)), style="green")
        line.append(told)
        yield line
        yield Text(
            f"get   {size(int(now.loaded_bytes))}/s   put {size(int(now.stored_bytes))}/s"
            f"   lookups {rate(now.lookups)}   evicted {rate(now.evictions)}"
        )

    def _tables(
        self, sample: Sample, tenants: Sequence[Tenant], room: int, gap: str
    ) -> Iterator[RenderableType]:
        """Shares the room that is left: what is short leaves its rest to the others."""
        names = {each.name for each in tenants}
        hot = [each for each in sample.hottest if each.tenant in names]
        clients = [(tenant.name, client) for tenant in tenants for client in tenant.clients]
        wanted = [len(hot), len(clients), len(tenants)]
        rows = _shared(wanted, room - 3 * (_TABLE_LINES + len(gap)))
        yield _hot_table(f"{gap}hottest prefixes", self._sorted(hot)[: rows[0]], len(hot))
        yield _client_table(f"{gap}clients", _by_load(clients)[: rows[1]], len(clients))
        if rows[2]:
            yield _tenant_table(f"{gap}tenants", tenants[: rows[2]], len(tenants))

    def _sorted(self, hot: Sequence[Hot]) -> list[Hot]:
        by = {
            "depth": lambda each: -each.depth,
            "idle": lambda each: each.idle_s or 0.0,
        }.get(self.sort, lambda each: -each.heat)
        return sorted(hot, key=by)


def _flow_of(sample: Sample, tenant: str | None) -> Flow:
    if sample.before is None:
        return Flow()
    chosen = [each for each in sample.report.tenants if tenant in (None, each.name)]
    return flow(chosen, sample.before.tenants, sample.seconds)


def _shared(wanted: Sequence[int], room: int) -> list[int]:
    """Rows for each, at least one where any is wanted and there is room."""
    rows = [0] * len(wanted)
    left = max(0, room)
    while left and any(rows[at] < wanted[at] for at in range(len(wanted))):
        for at, most in enumerate(wanted):
            if left and rows[at] < most:
                rows[at] += 1
                left -= 1
    return rows


def _clipped(parts: Iterator[RenderableType], width: int, height: int) -> Iterator[RenderableType]:
    """Lines end where the screen does, and tables with them."""
    from rich.console import Console
    from rich.segment import Segment, Segments

    console = Console(width=width, height=height, force_terminal=True, legacy_windows=False)
    options = console.options.update(no_wrap=True, overflow="ellipsis", highlight=False)
    left = height
    for part in parts:
        lines = console.render_lines(part, options, pad=False)[:left]
        for line in lines:
            yield Segments([*Segment.adjust_line_length(line, width, pad=False), Segment.line()])
        left -= len(lines)
        if left <= 0:
            return


# --- parts ---------------------------------------------------------------------------------------


def _tier_lines(tenants: Sequence[Tenant], width: int) -> Iterator[Text]:
    drams = [each.dram for each in tenants]
    yield _dram_line(drams, width)
    ssds = [each.ssd for each in tenants if each.ssd is not None]
    if ssds:
        yield _ssd_line(ssds, width)


def _dram_line(drams: Sequence[Dram], width: int) -> Text:
    used, limit = sum(each.used_bytes for each in drams), sum(each.limit_bytes for each in drams)
    blocks = count(sum(each.blocks for each in drams))
    pinned = count(sum(each.pinned_blocks for each in drams))
    told = f" {percent(used, limit):>4}  {size(used)} of {size(limit)}, {blocks} blocks"
    return _bar_line("DRAM", used, limit, f"{told}, {pinned} pinned", width)


def _ssd_line(ssds: Sequence[Ssd], width: int) -> Text:
    used = sum(each.used_bytes for each in ssds)
    limit = sum(each.capacity_bytes for each in ssds)
    blocks = count(sum(each.blocks for each in ssds))
    told = f" {percent(used, limit):>4}  {size(used)} of {size(limit)}, {blocks} blocks"
    told += f", {count(sum(each.queue_blocks for each in ssds))} queued"
    line = _bar_line("SSD", used, limit, told, width)
    faults = sum(sum(each.faults.values()) for each in ssds)
    if faults:
        line.append(f", {count(faults)} faults", style="yellow")
    if any(each.read_only_reason for each in ssds):
        line.append(", read-only", style="bold red")
    return line


def _bar_line(name: str, used: int, limit: int, told: str, width: int) -> Text:
    line = Text(f"{name:<6}")
    line.append(bar(used, limit, min(_BAR_WIDTH, width // 5)), style="cyan")
    line.append(told)
    return line


def _hot_table(title: str, shown: Sequence[Hot], whole: int) -> Table:
    made = table(
        f"{title} ({len(shown)} of {whole})",
        *("key", "namespace", "depth", "heat", "idle", "where", "kids"),
        left=("namespace", "where"),
    )
    for each in shown:
        where = {0: "-", 1: "DRAM", 2: "SSD", 3: "both"}[each.tiers & 3]
        idle = "-" if each.idle_s is None else duration(each.idle_s)
        space = (
            each.namespace
            if len(each.namespace) <= _NAME_COLUMNS
            else (f"{each.namespace[: _NAME_COLUMNS - 2]}..")
        )
        made.add_row(
            *(f"{each.key[:_KEY_DIGITS]}..", space, count(each.depth), f"{each.heat:.1f}"),
            *(idle, where, count(each.children)),
        )
    return made


def _by_load(clients: Sequence[tuple[str, Client]]) -> list[tuple[str, Client]]:
    return sorted(clients, key=lambda each: -each[1].loaded_bytes)


def _client_table(title: str, shown: Sequence[tuple[str, Client]], whole: int) -> Table:
    made = table(
        f"{title} ({len(shown)} of {whole})",
        *("name", "tenant", "pid", "by", "for", "loaded", "in", "leases"),
        left=("tenant", "by"),
    )
    for tenant, each in shown:
        by = "memory" if each.has_shm else "socket"
        made.add_row(
            *(each.name, tenant, f"{each.pid}", by, duration(each.age_s)),
            *(size(each.loaded_bytes), size(each.bytes_in), count(each.leases)),
        )
    return made


def _tenant_table(title: str, shown: Sequence[Tenant], whole: int) -> Table:
    made = table(
        f"{title} ({len(shown)} of {whole})",
        *("tenant", "DRAM", "of", "blocks", "hit", "loaded", "stored", "refused"),
    )
    for each in shown:
        ratio = each.traffic.hit_ratio()
        made.add_row(
            *(each.name, size(each.dram.used_bytes), size(each.dram.limit_bytes)),
            *(count(each.dram.blocks), "-" if ratio is None else f"{ratio:.0%}"),
            *(size(each.traffic.loaded_bytes), size(each.traffic.stored_bytes)),
            count(sum(each.traffic.refused.values())),
        )
    return made
