"""Runs every C++ test case as one pytest item, as shipped and under each sanitizer.

Each case gets its own process, so a crash loses one case and a report names the case that caused
it; a few run at once. Nothing is skipped: a build that is missing, that does not compile or that
lists no case is a failing item, and so is a case that checks nothing. `make core-tests` makes the
builds; here they are only brought up to date, so that a run never judges old code. The canaries
are cases that must fail: they prove that each build still catches what it is there for.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.pools import ROOT, alone_with

FLAVOURS = ("core", "asan", "tsan")
CASE_S_MAX = 300
CASES_AT_ONCE_MAX = 4
BUILD_S_MAX = 1800
SANITIZER_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}
CANARY = "canary: "
CANARY_REPORTS = [
    ("core", "fails", "CHECK( opaque(1) == 2 ) is NOT correct!"),
    ("core", "checks nothing", "the case checks nothing"),
    ("asan", "reads past the end", "AddressSanitizer: heap-buffer-overflow"),
    ("asan", "leaks", "LeakSanitizer: detected memory leaks"),
    ("asan", "overflows", "runtime error: signed integer overflow"),
    ("tsan", "races", "ThreadSanitizer: data race"),
]
FRAME = re.compile(r"\[doctest\]|=+$|$")  # what doctest prints around its findings
SUMMARY = re.compile(
    r"test cases: *(?P<cases>\d+) \| *(?P<passed>\d+) passed.*\n.*assertions: *(?P<asserted>\d+) "
)


@dataclass(frozen=True)
class Build:
    """One build of the C++ tests: the words before its command, its cases, or why it has none."""

    command: tuple[str, ...]
    cases: tuple[str, ...] = ()
    fault: str = ""


def run(
    command: tuple[str, ...], timeout_s: float = CASE_S_MAX
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | SANITIZER_OPTIONS
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=timeout_s, check=False
    )


def prefix_for(binary: str) -> tuple[str, ...]:
    """TSan of g++ 12 cannot start where the kernel spreads mappings widely: then pin them."""
    refused = "unexpected memory mapping" in run((binary, "--help")).stderr
    return ("setarch", "-R") if refused else ()


def open_build(folder: Path) -> Build:
    """Brings one build up to date and lists its cases."""
    binary = str(folder / "kvpool_core_tests")
    if not (folder / "build.ninja").exists():
        return Build((binary,), fault=f"{folder} is not built: run `make test`")
    with alone_with(folder):
        made = run(("cmake", "--build", str(folder)), BUILD_S_MAX)
    if made.returncode != 0:
        return Build((binary,), fault=f"{folder} does not build:\n{made.stdout[-4000:]}")
    command = (*prefix_for(binary), binary)
    listing = run((*command, "--list-test-cases", "--no-skip", "--reporters=xml"))
    if listing.returncode != 0:
        return Build(command, fault=f"{binary} cannot list its cases:\n{listing.stderr}")
    names = [
        case.attrib["name"] for case in ElementTree.fromstring(listing.stdout).iter("TestCase")
    ]
    cases = tuple(name for name in names if not name.startswith(CANARY))
    return Build(command, cases, "" if cases else f"{binary} has no test cases")


def escaped(name: str) -> str:
    return name.replace("\\", "\\\\").replace(",", "\\,")


def run_case(build: Build, name: str) -> str:
    """Runs one case; the answer is what is wrong with it, or nothing."""
    select = f"--test-case={escaped(name)}"
    done = run(
        (*build.command, "--case-sensitive=true", "--no-skip=true", "--no-path-filenames", select)
    )
    summary = SUMMARY.search(done.stdout)
    if done.returncode != 0 or summary is None:
        report = [line for line in done.stdout.splitlines() if not FRAME.match(line)]
        return "\n".join([f"exit status {done.returncode}", *report, done.stderr])
    if int(summary["cases"]) != 1:
        return f"the name selects {summary['cases']} cases: make it plain and unique"
    if int(summary["asserted"]) == 0:
        return "the case checks nothing"
    return ""


BUILDS = {flavour: open_build(ROOT / "build" / flavour) for flavour in FLAVOURS}
ITEMS = [
    pytest.param(flavour, case, id=f"{flavour}-{case}")
    for flavour, build in BUILDS.items()
    for case in (build.cases or ("(no cases)",))
]


def verdict(flavour: str, case: str) -> str:
    build = BUILDS[flavour]
    return build.fault or run_case(build, case)


@pytest.fixture(scope="session")
def verdicts(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str], Future[str]]]:
    """Of the cases asked for, some at once: most wait, on purpose, more than they compute."""
    of_cases = [
        item.callspec.params
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test_core
    ]
    wanted = [(str(params["flavour"]), str(params["case"])) for params in of_cases]
    with ThreadPoolExecutor(min(CASES_AT_ONCE_MAX, os.cpu_count() or 1)) as pool:
        yield {(flavour, case): pool.submit(verdict, flavour, case) for flavour, case in wanted}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(("flavour", "case"), ITEMS)
def test_core(flavour: str, case: str, verdicts: dict[tuple[str, str], Future[str]]) -> None:
    wrong = verdicts[flavour, case].result()
    if wrong:
        pytest.fail(wrong, pytrace=False)


@pytest.mark.parametrize(("flavour", "case", "report"), CANARY_REPORTS)
def test_canary_is_caught(flavour: str, case: str, report: str) -> None:
    assert report in verdict(flavour, CANARY + case)
