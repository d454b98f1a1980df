"""Who else is there: the members of a cluster, from etcd or from a list.

`registrar` and `view` decide, and are fed answers and the time; `membership` and `static_members`
run them and show a `roster` to the rest of the node. docs/cluster.md says what this promises.
"""
