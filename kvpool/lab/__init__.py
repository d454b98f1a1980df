"""A cluster on one machine: real daemons and a real etcd, each on a network of its own, that can be
killed, stopped, cut off and starved of disk. For tests, benches and examples; Linux and root."""
