"""Names and HELP of the metrics that are one field of a report each. A HELP says what to do.

Names hold to Prometheus' rules: base units, the unit last; counters get their _total from the
library. A name that is out is not changed: dashboards and alerts hang on it.
"""

from __future__ import annotations

Named = tuple[str, str, str]  # name, HELP, field of the struct it is read from

# Of Traffic; labels tenant and namespace.
TRAFFIC_COUNTERS: tuple[Named, ...] = (
    ("kvpool_lookups", "Calls of lookup.", "lookups"),
    (
        "kvpool_requested_blocks",
        "Blocks that lookups asked for: hit and missed together. The hit ratio is "
        "rate(kvpool_hit_blocks_total) over rate of this.",
        "requested",
    ),
    (
        "kvpool_requested_tokens",
        "As kvpool_requested_blocks, in tokens. 0 where the namespace does not say its "
        "block_tokens.",
        "requested_tokens",
    ),
    ("kvpool_gets", "Calls that read blocks: copies, views and leases.", "gets"),
    (
        "kvpool_asked_blocks",
        "Blocks that gets asked for: loaded and failed together.",
        "asked",
    ),
    (
        "kvpool_loaded_bytes",
        "Payload handed to engines. Its rate is what the pool saves them from computing again.",
        "loaded_bytes",
    ),
    (
        "kvpool_given_blocks",
        "Blocks that puts brought: stored, present and refused together.",
        "given",
    ),
    ("kvpool_given_bytes", "As kvpool_given_blocks, in payload bytes.", "given_bytes"),
    ("kvpool_stored_blocks", "Blocks that puts stored.", "stored"),
    ("kvpool_stored_bytes", "As kvpool_stored_blocks, in payload bytes.", "stored_bytes"),
    (
        "kvpool_present_blocks",
        "Blocks of puts that were there already. Many: engines compute what they could have got; "
        "let them look up first.",
        "present",
    ),
)

# Of Traffic, by tier or reason: name, HELP, what became of the blocks, the label.
TRAFFIC_SPLIT: tuple[tuple[str, str, str, str], ...] = (
    (
        "kvpool_hit_blocks",
        "Blocks that lookups found, by the fastest tier that has them. Many on ssd: more DRAM "
        "makes them faster.",
        "hit",
        "tier",
    ),
    ("kvpool_hit_tokens", "As kvpool_hit_blocks, in tokens.", "hit", "tier"),
    (
        "kvpool_missed_blocks",
        "Blocks that lookups did not find. absent: the first missing one of a lookup; behind: "
        "after such a one. kvpool explain says why a prefix is absent.",
        "missed",
        "reason",
    ),
    ("kvpool_missed_tokens", "As kvpool_missed_blocks, in tokens.", "missed", "reason"),
    ("kvpool_loaded_blocks", "Blocks that gets delivered, by tier.", "loaded", "tier"),
    ("kvpool_loaded_tokens", "As kvpool_loaded_blocks, in tokens.", "loaded", "tier"),
    (
        "kvpool_failed_blocks",
        "Blocks that gets did not deliver. moved: evicted between lookup and get, so give more "
        "room or take a lease; ssd_late, ssd_damaged: look at the disk; timed_out, disconnected: "
        "at the daemon's log.",
        "failed",
        "reason",
    ),
    ("kvpool_failed_tokens", "As kvpool_failed_blocks, in tokens.", "failed", "reason"),
    (
        "kvpool_refused_blocks",
        "Blocks that puts did not store as asked. pool_pinned: readers hold everything, look at "
        "kvpool_leases; index_full, too_large, no_memory: resize; not_durable: in DRAM, not on the "
        "SSD.",
        "refused",
        "reason",
    ),
)

# Of Dram; label tenant.
DRAM_GAUGES: tuple[Named, ...] = (
    (
        "kvpool_dram_limit_bytes",
        "What blocks may take now. Change it live with kvpool resize.",
        "limit_bytes",
    ),
    ("kvpool_dram_max_bytes", "The most that a resize may ask for.", "max_bytes"),
    (
        "kvpool_dram_committed_bytes",
        "Memory taken from the system. Much above used: kvpool trim gives it back.",
        "committed_bytes",
    ),
    ("kvpool_dram_used_bytes", "Memory that blocks take.", "used_bytes"),
    (
        "kvpool_dram_book_bytes",
        "Index, records and ghosts: on top of the blocks' memory.",
        "book_bytes",
    ),
    ("kvpool_dram_blocks", "Blocks in DRAM.", "blocks"),
    (
        "kvpool_dram_pinned_blocks",
        "Blocks that cannot go: being read or written, or pinned by an operator. Near "
        "kvpool_dram_blocks: puts will be refused.",
        "pinned_blocks",
    ),
    (
        "kvpool_dram_held_slots",
        "Slots of blocks that are gone and that a client still looks at.",
        "held_slots",
    ),
)

# Of Ssd; label tenant.
SSD_GAUGES: tuple[Named, ...] = (
    ("kvpool_ssd_capacity_bytes", "What its files may take.", "capacity_bytes"),
    ("kvpool_ssd_used_bytes", "What blocks take of it.", "used_bytes"),
    ("kvpool_ssd_index_bytes", "Size of the index file.", "index_bytes"),
    (
        "kvpool_ssd_index_used_bytes",
        "Used of the index file. Near kvpool_ssd_index_bytes: no block more gets on the SSD; give "
        "it a larger capacity.",
        "index_used_bytes",
    ),
    ("kvpool_ssd_blocks", "Blocks on the SSD.", "blocks"),
    (
        "kvpool_ssd_queue_blocks",
        "Blocks that wait for write-back. Growing for minutes: the disk is slower than the puts.",
        "queue_blocks",
    ),
    (
        "kvpool_ssd_quarantined_blocks",
        "Room set aside since a write there failed; kvpool ssd verify looks at it.",
        "quarantined_blocks",
    ),
)
SSD_COUNTERS: tuple[Named, ...] = (
    ("kvpool_ssd_written_blocks", "Blocks that write-back brought to the SSD.", "written_blocks"),
    (
        "kvpool_ssd_written_bytes",
        "As kvpool_ssd_written_blocks, in bytes: what wears the disk.",
        "written_bytes",
    ),
    ("kvpool_ssd_read_blocks", "Blocks read from the SSD.", "read_blocks"),
    ("kvpool_ssd_read_bytes", "As kvpool_ssd_read_blocks, in bytes.", "read_bytes"),
)

# Of Policy; label tenant.
POLICY_GAUGES: tuple[Named, ...] = (
    (
        "kvpool_heat_half_life_seconds",
        "A block's heat halves in this time; it follows how soon blocks are used again.",
        "tau_s",
    ),
    ("kvpool_ghosts", "Blocks that are gone and whose heat is remembered.", "ghosts"),
)
POLICY_COUNTERS: tuple[Named, ...] = (
    (
        "kvpool_ghost_hits",
        "Puts of a block that was here before. Many: the pool is too small for what is used again.",
        "ghost_hits",
    ),
    ("kvpool_demotions", "Blocks that left DRAM and stayed on the SSD.", "demotions"),
    ("kvpool_promotions", "Blocks brought from the SSD to DRAM.", "promotions"),
    (
        "kvpool_not_worth_blocks",
        "Evicted blocks that were too cold for a full SSD.",
        "not_worth",
    ),
)

# Of Tenant; label tenant.
TENANT_GAUGES: tuple[Named, ...] = (
    (
        "kvpool_pinned_prefixes",
        "Prefixes that an operator pinned; kvpool unpin lets them go.",
        "pinned_prefixes",
    ),
)

# Of Client; labels tenant, client and name.
CLIENT_GAUGES: tuple[Named, ...] = (
    ("kvpool_client_leases", "Leases that the client has now.", "leases"),
    (
        "kvpool_client_leased_bytes",
        "Payload under the client's leases. At its share of the pool, its reads fail as pin_limit.",
        "leased_bytes",
    ),
)
