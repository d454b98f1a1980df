"""From a plan to a node's place among the members."""

from __future__ import annotations

import contextlib
import socket
import time

from kvpool.address import host_and_port
from kvpool.cluster.gateway import Gateway, timeout_for
from kvpool.cluster.member import Member
from kvpool.cluster.membership import Membership
from kvpool.cluster.node_id import NodeId, StateDirectory
from kvpool.cluster.plans import ClusterPlan
from kvpool.cluster.static_members import StaticMembers, id_of_address
from kvpool.cluster.told import Told
from kvpool.serve_log import EventLog

Members = Membership | StaticMembers


class Place:
    """Who this node is, and who else is there. Not yet entered: members.start() does that."""

    def __init__(self, plan: ClusterPlan, bound_port: int, log: EventLog) -> None:
        """bound_port: where the node listens. Raises StateRefused."""
        host, port = plan.advertise
        self.address = host_and_port(host, port or bound_port)
        with contextlib.ExitStack() as stack:
            self._state = StateDirectory(plan.state_dir, time.time_ns)
            stack.callback(self._state.close)
            self.node = self._state.node
            self.members: Members = self._members(plan, log)
            stack.pop_all()

    def close(self) -> None:
        """Leaves, and gives the state directory back."""
        self.members.close()
        self._state.close()

    def _members(self, plan: ClusterPlan, log: EventLog) -> Members:
        if plan.static:
            self.node = NodeId(id_of_address(plan.name, self.address), self.node.incarnation)
            return StaticMembers(plan.name, plan.static, self.address)
        me = Member(
            id=self.node.id,
            incarnation=self.node.incarnation,
            addresses=(self.address,),
            weight=plan.weight,
            host=socket.gethostname(),
        )
        gateway = Gateway(list(plan.etcd), plan.access, timeout_for(plan.ttl_s))
        return Membership(gateway, plan.names, me, Told(log), ttl_s=plan.ttl_s)
