"""examples/deploy: the files agree with each other and with kvpool, and what Prometheus is told to
do it does: scrape, alert, answer every query of the dashboard."""

from __future__ import annotations

import configparser
import contextlib
import http.client
import json
import math
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import time
import tomllib
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpool import serve_config
from kvpool.config import parse_size
from kvpool.observe import metrics
from kvpool.observe.http_access import Access
from tests import reports
from tests.web.moving import Moving, running

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "examples" / "deploy"
CASES = ("alerts.test.yml", "alerts-day.test.yml")
TOKEN = "scrape-" + "a" * 32
WAIT_S = 60.0
IN_HELP = re.compile(r"\bkvpool_[a-z0-9_]+")


def text_of(name: str) -> str:
    return (DEPLOY / name).read_text(encoding="utf-8")


def needs(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed (Debian: prometheus)")


def promtool(*arguments: str, folder: Path = DEPLOY) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["promtool", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


def documents(name: str) -> list[Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is one of the packages for development")
    return list(yaml.safe_load_all(text_of(name)))


# --- rules ----------------------------------------------------------------------------------------


def test_the_rules_are_rules_and_their_cases_hold() -> None:
    needs("promtool")
    done = promtool("check", "rules", "alerts.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    done = promtool("test", "rules", *CASES)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("good", "bad"),
    [("> 0.05", "> 0.5"), ('kind!="late"', 'kind!="damaged"')],
)
def test_the_cases_would_notice(tmp_path: Path, good: str, bad: str) -> None:
    needs("promtool")
    rules = text_of("alerts.yml")
    assert good in rules
    (tmp_path / "alerts.yml").write_text(rules.replace(good, bad))
    (tmp_path / "alerts.test.yml").write_text(text_of("alerts.test.yml"))
    assert promtool("test", "rules", "alerts.test.yml", folder=tmp_path).returncode != 0


def test_every_alert_has_a_case_and_says_what_to_do() -> None:
    (rules,) = documents("alerts.yml")
    fired = {
        case["alertname"]
        for name in CASES
        for test in documents(name)[0]["tests"]
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    alerts = [rule for group in rules["groups"] for rule in group["rules"]]
    assert fired == {each["alert"] for each in alerts}
    for each in alerts:
        assert each["labels"]["severity"] in ("critical", "warning", "info")
        assert each["annotations"]["action"].endswith((".", "peer."))


# --- names ----------------------------------------------------------------------------------------


def exposed() -> set[str]:
    text, _ = metrics.Exposition().text(reports.example())
    return {re.split(r"[{ ]", line)[0] for line in text.decode().splitlines() if line[0] != "#"}


def dashboard() -> Any:
    return json.loads(text_of("grafana-dashboard.json"))


def expressions() -> list[tuple[str, str]]:
    """Title of the panel, query."""
    return [
        (panel["title"], target["expr"])
        for panel in dashboard()["panels"]
        for target in panel["targets"]
    ]


@pytest.mark.parametrize("name", ["alerts.yml", *CASES, "grafana-dashboard.json"])
def test_only_metrics_that_there_are(name: str) -> None:
    found = set(IN_HELP.findall(text_of(name)))
    assert found
    assert found - exposed() == set()


def test_help_names_only_what_there_is() -> None:
    text, _ = metrics.Exposition().text(reports.example())
    named = {
        word
        for line in text.decode().splitlines()
        if line.startswith("# HELP")
        for word in IN_HELP.findall(line.split(" ", 3)[3])
    }
    known = exposed() | {each.removesuffix("_total") for each in exposed()}
    assert named - known == set()


def test_panels_do_not_overlap_and_fit_the_grid() -> None:
    taken: set[tuple[int, int]] = set()
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


# --- a real Prometheus ----------------------------------------------------------------------------


class Prometheus:
    """Scrapes every half second, as examples/deploy/prometheus.yml has it otherwise."""

    def __init__(self, folder: Path, target: int) -> None:
        config = text_of("prometheus.yml")
        assert "127.0.0.1:7071" in config
        config = config.replace("127.0.0.1:7071", f"127.0.0.1:{target}").replace("15s", "500ms")
        (folder / "prometheus.yml").write_text(config)
        (folder / "alerts.yml").write_text(text_of("alerts.yml"))
        (folder / "kvpool-token").write_text(TOKEN)
        self.port = free_port()
        self.log = folder / "log.txt"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                    "--log.level=warn",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(WAIT_S)

    def ask(self, path: str, **query: str) -> Any:
        """None while it does not answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        with contextlib.closing(connection):
            try:
                connection.request("GET", f"{path}?{urllib.parse.urlencode(query)}")
                body = connection.getresponse().read()
                return json.loads(body)
            except (OSError, http.client.HTTPException, json.JSONDecodeError):
                return None

    def values(self, expression: str) -> list[float]:
        answer = self.ask("/api/v1/query", query=expression)
        if answer is None:
            return []
        assert answer["status"] == "success", f"{expression}: {answer}"
        return [float(each["value"][1]) for each in answer["data"]["result"]]

    def wait_for(self, expression: str) -> list[float]:
        """Until there is at least one value that is a number."""
        deadline = time.monotonic() + WAIT_S
        while True:
            found = [value for value in self.values(expression) if not math.isnan(value)]
            if found:
                return found
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, f"no data: {expression}\n{self.log.read_text()}"
            select.select([], [], [], 0.1)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    needs("prometheus")
    source = Moving(("chat", "batch"))
    source.fill(60)
    access = Access(is_loopback=True, admin_token=TOKEN)
    with running(source, access) as site:
        server = Prometheus(tmp_path_factory.mktemp("prometheus"), site.port)
        try:
            server.wait_for("up == 1")
            yield server
        finally:
            server.close()


def filled_in(expression: str) -> str:
    """With what Grafana puts for the variables when all is chosen."""
    for name, value in [
        ("$__rate_interval", "10s"),
        ("$instance", ".*"),
        ("$tenant", ".*"),
    ]:
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


def test_prometheus_scrapes_with_the_token(prometheus: Prometheus) -> None:
    assert prometheus.wait_for("up") == [1.0]
    assert len(prometheus.wait_for('kvpool_requested_blocks_total{tenant="batch"}')) == 2


@pytest.mark.parametrize(("title", "expression"), expressions())
def test_every_panel_has_data(prometheus: Prometheus, title: str, expression: str) -> None:
    found = prometheus.wait_for(filled_in(expression))
    assert all(value >= 0 for value in found)
    if "ratio" in title:
        assert all(0.2 < value < 0.9 for value in found)


def test_every_variable_has_values(prometheus: Prometheus) -> None:
    queries = [
        each["query"]["query"]
        for each in dashboard()["templating"]["list"]
        if each["type"] == "query"
    ]
    assert len(queries) == 2
    for query in queries:
        match = re.fullmatch(r"label_values\((\w+), (\w+)\)", query)
        assert match is not None
        name, label = match.groups()
        prometheus.wait_for(name)
        answer = prometheus.ask(f"/api/v1/label/{label}/values", **{"match[]": name})
        assert answer["data"], query
        if label == "tenant":
            assert answer["data"] == ["batch", "chat"]


def test_the_rules_are_evaluated_there(prometheus: Prometheus) -> None:
    deadline = time.monotonic() + WAIT_S
    while True:
        (group,) = prometheus.ask("/api/v1/rules")["data"]["groups"]
        health = {rule["name"]: (rule["health"], rule.get("lastError")) for rule in group["rules"]}
        if all(told == "ok" for told, _ in health.values()):
            break
        assert all(told != "err" for told, _ in health.values()), health
        assert time.monotonic() < deadline, health
    states = {rule["name"]: rule["state"] for rule in group["rules"]}
    assert states["KvpoolDown"] == "inactive"


# --- a host, an image, a cluster ------------------------------------------------------------------


def load(folder: Path, config: str) -> dict[str, Any]:
    """As kvpool serve would read it."""
    path = folder / "kvpool.toml"
    path.write_text(config)
    serve_config.load(str(path), {})
    return tomllib.loads(config)


def config_map() -> str:
    (found,) = [each for each in documents("kubernetes.yaml") if each["kind"] == "ConfigMap"]
    return str(found["data"]["kvpool.toml"])


def test_the_configurations_are_ones(tmp_path: Path) -> None:
    assert load(tmp_path, text_of("kvpool.toml"))["http"]["listen"] == "127.0.0.1:7071"
    assert load(tmp_path, config_map())["http"]["token_file"].startswith("/etc/kvpool-token/")


def test_the_unit_agrees_with_the_configuration() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(text_of("kvpool.service"))
    service = unit["Service"]
    config = tomllib.loads(text_of("kvpool.toml"))
    program, command, flag, path = service["ExecStart"].split()
    assert (Path(program).name, command, flag) == ("kvpool", "serve", "--config")
    assert path == f"/etc/{service['ConfigurationDirectory']}/kvpool.toml"
    assert Path(config["server"]["socket"]).parent == Path("/run") / service["RuntimeDirectory"]
    assert Path(config["ssd"]["path"]) == Path("/var/lib") / service["StateDirectory"]
    assert re.search(rf"^u {service['User']} ", text_of("kvpool.sysusers"), re.MULTILINE)
    assert service["ExecReload"].endswith("-HUP $MAINPID")
    drain = next(each for each in serve_config.options() if each.name == "drain_timeout")
    assert float(service["TimeoutStopSec"]) > drain.default + 1
    if shutil.which("systemd-analyze") is None:
        return
    done = subprocess.run(
        ["systemd-analyze", "verify", str(DEPLOY / "kvpool.service")],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    other = [line for line in done.stderr.splitlines() if "not executable" not in line]
    assert [line for line in other if "kvpool.service" in line] == []


def instructions(text: str) -> list[tuple[str, str]]:
    joined = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    lines = [line.strip() for line in joined.splitlines() if line.strip()]
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def test_the_image_is_made_of_what_there_is() -> None:
    found = instructions(text_of("Dockerfile"))
    assert {name for name, _ in found} <= {
        *("FROM", "RUN", "COPY", "ENV", "USER", "VOLUME", "STOPSIGNAL", "ENTRYPOINT", "CMD")
    }
    for name, rest in found:
        if name == "COPY" and "--from" not in rest:
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
        if name in ("ENTRYPOINT", "CMD", "VOLUME"):
            assert isinstance(json.loads(rest), list)
    users = [rest for name, rest in found if name == "USER"]
    assert users == ["10001:10001"]
    build = next(rest for name, rest in found if name == "RUN")
    setup = (ROOT / ".ci" / "setup").read_text()
    for package in ("g++", "cmake", "ninja-build", "libxxhash-dev", "liblmdb-dev"):
        assert package in build.split()
        assert package in setup


def test_the_manifests_agree_with_each_other() -> None:
    (daemon,) = [each for each in documents("kubernetes.yaml") if each["kind"] == "DaemonSet"]
    config = tomllib.loads(config_map())
    pod = daemon["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    labels = daemon["spec"]["template"]["metadata"]["labels"]
    assert daemon["spec"]["selector"]["matchLabels"].items() <= labels.items()
    volumes = {each["name"] for each in pod["volumes"]}
    mounts = {each["mountPath"] for each in container["volumeMounts"]}
    for each in [*pod["initContainers"], container]:
        assert {mount["name"] for mount in each["volumeMounts"]} <= volumes
    assert str(Path(config["server"]["socket"]).parent) in mounts
    assert config["ssd"]["path"] in mounts
    assert str(Path(config["http"]["token_file"]).parent) in mounts
    assert container["args"] == ["--config", "/etc/kvpool/kvpool.toml"]
    (port,) = container["ports"]
    host, _, number = config["http"]["listen"].rpartition(":")
    assert (host, int(number)) == ("0.0.0.0", port["containerPort"])
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        get = container[probe]["httpGet"]
        assert get["port"] == port["name"]
        assert get["path"] in ("/healthz", "/readyz")
    memory = container["resources"]["limits"]["memory"]
    assert container["resources"]["requests"]["memory"] == memory
    dram = parse_size(config["pool"]["dram"])
    assert parse_size(f"{memory}B") >= dram * 1.01 + (512 << 20)
    security = container["securityContext"]
    assert security["runAsNonRoot"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    user = instructions(text_of("Dockerfile"))
    assert ("USER", f"{security['runAsUser']}:{security['runAsGroup']}") in user
