"""What [cluster] may say, and what is refused with the option's name."""

from pathlib import Path
from typing import Any

import pytest

from kvpool import serve_config, serve_plan
from kvpool.cluster.core import CoreLimits
from kvpool.cluster.http_post import Endpoint
from kvpool.cluster.member import Member
from kvpool.cluster.plans import ClusterPlan
from kvpool.cluster.static_members import StaticMembers, id_of_address
from kvpool.errors import BadArgument

LOCAL = {"listen": "127.0.0.1:7070", "cluster_etcd": "127.0.0.1:2379"}


@pytest.fixture
def token(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text("what members prove")
    return str(path)


def planned(**flags: Any) -> ClusterPlan | None:
    settings = serve_config.load(None, {}, flags)
    return serve_plan.plan(settings, {"XDG_RUNTIME_DIR": "/nowhere", "HOME": "/home-of-it"}).cluster


def plan_of(**flags: Any) -> ClusterPlan:
    found = planned(**flags)
    assert found is not None
    return found


def refusal(**flags: Any) -> str:
    with pytest.raises(BadArgument) as error:
        planned(**flags)
    return str(error.value)


def test_without_the_table_there_is_no_cluster() -> None:
    assert planned() is None
    assert planned(listen="127.0.0.1:7070") is None


def test_the_least_that_makes_a_member() -> None:
    plan = plan_of(**LOCAL)
    assert plan.etcd == (Endpoint("127.0.0.1", 2379),)
    assert (plan.static, plan.advertise) == ((), ("127.0.0.1", 7070))
    assert (plan.name, plan.prefix, plan.weight, plan.ttl_s) == ("default", "/kvpool", 1, 10)
    assert (plan.token, plan.access.tls, plan.access.user) == (None, None, None)
    assert plan.state_dir.endswith("kvpool/cluster/default")
    assert plan.limits == CoreLimits(64 << 20, 2, 64 << 20)


def test_all_of_it_in_a_file(tmp_path: Path, token: str) -> None:
    file = tmp_path / "kvpool.toml"
    file.write_text(
        f"""
        [server]
        listen = "0.0.0.0:7070"
        token_file = "{tmp_path / "clients"}"
        [cluster]
        name = "west"
        etcd = ["http://10.0.0.1:2379", "[fd00::1]:2379", "10.0.0.3:2379/"]
        prefix = "/pools/kv"
        advertise = "10.0.0.7:7070"
        weight = 4
        token_file = "{token}"
        ttl = "4.5s"
        user = "pool"
        password_file = "{token}"
        state_dir = "{tmp_path}"
        directory_bytes = "1GiB"
        max_replicas = 4
        replica_bytes_per_s = "100MiB/s"
        """
    )
    (tmp_path / "clients").write_text("what clients prove")
    plan = serve_plan.plan(serve_config.load(str(file), {}), {}).cluster
    assert plan is not None
    assert [str(each) for each in plan.etcd] == [
        "10.0.0.1:2379",
        "[fd00::1]:2379",
        "10.0.0.3:2379",
    ]
    assert plan.names.root == "/pools/kv/west/"
    assert plan.advertise == ("10.0.0.7", 7070)
    assert (plan.weight, plan.ttl_s, plan.token) == (4, 5, "what members prove")
    assert (plan.access.user, plan.access.password) == ("pool", "what members prove")
    assert plan.state_dir == str(tmp_path)
    assert plan.limits == CoreLimits(1 << 30, 4, 100 << 20)
    assert "prove" not in repr(plan)
    assert serve_config.faults(str(file)) == []


def test_a_list_of_members() -> None:
    plan = plan_of(listen="127.0.0.1:7071", cluster_static="127.0.0.1:7070, 127.0.0.1:7071")
    assert plan.static == ("127.0.0.1:7070", "127.0.0.1:7071")
    assert plan.etcd == ()
    members = StaticMembers(plan.name, plan.static, "127.0.0.1:7071")
    other = StaticMembers(plan.name, plan.static[::-1], "127.0.0.1:7070")
    roster = members.roster
    assert roster.fingerprint == other.roster.fingerprint
    assert roster.members == other.roster.members
    assert roster.own == id_of_address(plan.name, "127.0.0.1:7071") != other.roster.own
    assert {each.addresses[0] for each in roster.members} == set(plan.static)
    assert all(isinstance(each, Member) and each.weight == 1 for each in roster.members)
    assert members.newer(0, 0) is roster
    assert members.newer(1, 0.01) is None
    members.close()
    assert members.newer(1, 60) is None


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"cluster_name": "x"}, "--cluster-name is 'x', but there is no cluster; set etcd"),
        ({"cluster_weight": "2"}, "--cluster-weight is 2, but there is no cluster"),
        ({"cluster_etcd": "127.0.0.1:2379"}, "--cluster-etcd makes this node a member, but"),
        (LOCAL | {"cluster_static": "127.0.0.1:7070"}, "but there is an etcd, too"),
        (LOCAL | {"cluster_name": "a/b"}, "--cluster-name is 'a/b'; a cluster's name"),
        (LOCAL | {"cluster_prefix": "kvpool"}, "--cluster-prefix is 'kvpool'; write names"),
        (LOCAL | {"cluster_prefix": "/a//b"}, "--cluster-prefix"),
        (LOCAL | {"cluster_weight": "0"}, "--cluster-weight is 0; it must be 1..256"),
        (LOCAL | {"cluster_weight": "257"}, "--cluster-weight is 257"),
        (LOCAL | {"cluster_ttl": "1"}, "--cluster-ttl is 1.0; it must be 2..300"),
        (LOCAL | {"cluster_ttl": "soon"}, "--cluster-ttl"),
        (LOCAL | {"cluster_directory_bytes": "1KiB"}, "--cluster-directory-bytes is 1024 bytes"),
        (LOCAL | {"cluster_directory_bytes": "65GiB"}, "--cluster-directory-bytes"),
        (LOCAL | {"cluster_max_replicas": 0}, "--cluster-max-replicas is 0; it must be 1..4"),
        (LOCAL | {"cluster_max_replicas": 5}, "--cluster-max-replicas is 5; it must be 1..4"),
        (
            LOCAL | {"cluster_replica_bytes_per_s": "1000/s"},
            "--cluster-replica-bytes-per-s is 1000",
        ),
        (LOCAL | {"cluster_etcd": "127.0.0.1"}, "--cluster-etcd is '127.0.0.1'; write host:port"),
        (LOCAL | {"cluster_etcd": "a:1,,b:2"}, "--cluster-etcd is 'a:1,,b:2'; write 1..16"),
        (LOCAL | {"cluster_etcd": "[::1]:1,[::1]:1"}, "--cluster-etcd has '[::1]:1' twice"),
        (LOCAL | {"cluster_etcd": "ftp://[::1]:1"}, "--cluster-etcd has 'ftp://[::1]:1'"),
        (LOCAL | {"cluster_etcd": "http://[::1]:1,https://[::1]:2"}, "beside https"),
        (LOCAL | {"cluster_user": "x"}, "--cluster-user is 'x'; set password_file, too"),
        (LOCAL | {"cluster_cert_file": "x"}, "--cluster-cert-file is 'x'; set key_file, too"),
        (LOCAL | {"cluster_ca_file": "/no/ca"}, "--cluster-ca-file is '/no/ca', which is not"),
        (LOCAL | {"cluster_token_file": "/no/t"}, "--cluster-token-file is '/no/t': cannot be"),
        (LOCAL | {"cluster_advertise": "0.0.0.0:1"}, "--cluster-advertise is '0.0.0.0:1', which"),
        (LOCAL | {"cluster_advertise": "[::]:1"}, "none that another one can connect to; set"),
        (LOCAL | {"cluster_advertise": "224.0.0.1:1"}, "an address of many machines"),
        (LOCAL | {"cluster_advertise": "[ff02::1]:1"}, "an address of many machines"),
        (LOCAL | {"cluster_advertise": "10.0.0.1:0"}, "--cluster-advertise has the port 0"),
        (LOCAL | {"cluster_advertise": "no.such.host.invalid:1"}, "no such host"),
        (LOCAL | {"cluster_advertise": "10.0.0.1:7070"}, "which other machines can reach: a"),
        (LOCAL | {"cluster_etcd": "10.0.0.1:2379"}, "--listen is '127.0.0.1:7070', which is on"),
        (
            {"listen": "127.0.0.1:7071", "cluster_static": "127.0.0.1:7070"},
            "--cluster-static does not have 127.0.0.1:7071, which is this node",
        ),
        (
            {"listen": "127.0.0.1:1", "cluster_static": "127.0.0.1:1", "cluster_ttl": "5"},
            "--cluster-ttl is '5', but members come from a list",
        ),
        (
            {"listen": "127.0.0.1:1", "cluster_static": "127.0.0.1:1,0.0.0.0:1"},
            "--cluster-static is '0.0.0.0:1', which is every address",
        ),
        (
            {"listen": "127.0.0.1:1", "cluster_static": "127.0.0.1:1,10.0.0.1:1"},
            "--listen is '127.0.0.1:1', which is on every machine that machine itself",
        ),
    ],
)
def test_what_cannot_be_meant_is_named(flags: dict[str, str], complaint: str) -> None:
    assert complaint in refusal(**flags)


def test_members_need_a_token_of_their_own(tmp_path: Path, token: str) -> None:
    told = {"listen": "127.0.0.1:1", "cluster_etcd": "[::1]:2379", "cluster_token_file": token}
    assert plan_of(**told).token == "what members prove"
    assert "--cluster-token-file holds the token of the tenant" in refusal(**told, token_file=token)
    assert "--cluster-token-file holds the token of administrators" in refusal(
        **told, admin_token_file=token
    )


def test_a_certificate_that_is_none(tmp_path: Path, token: str) -> None:
    assert "--cluster-ca-file" in refusal(**LOCAL, cluster_ca_file=token)
    assert "do not go together" in refusal(**LOCAL, cluster_cert_file=token, cluster_key_file=token)


def test_tls_by_what_the_system_trusts() -> None:
    plan = plan_of(**LOCAL | {"cluster_etcd": "https://127.0.0.1:2379"})
    assert plan.access.tls is not None
    assert plan.access.tls.check_hostname


def test_a_reload_says_that_a_cluster_needs_a_restart() -> None:
    one = serve_config.load(None, {}, LOCAL).config
    other = serve_config.load(None, {}, LOCAL | {"cluster_weight": "2"}).config
    assert serve_plan.needs_restart(one, other) == ["[cluster] weight"]
