// What the report means: sums, sentences, and what to do about what did not work. Pure.

import { bytes, count, percent, seconds, words } from "./format.js";

const sum = (list, of) => list.reduce((total, each) => total + of(each), 0);
const added = (list, of) => list.reduce((total, each) => {
  for (const [name, value] of Object.entries(of(each))) total[name] = (total[name] ?? 0) + value;
  return total;
}, {});

const hits = (traffic) => traffic.hit_dram + traffic.hit_ssd + traffic.hit_remote;
const loaded = (traffic) => traffic.loaded_dram + traffic.loaded_ssd + traffic.loaded_remote;

// As Traffic.hit_ratio() of the daemon has it: of lookups, or of gets where nobody looks up.
export function hitRatio(traffic) {
  if (traffic.requested) return hits(traffic) / traffic.requested;
  return traffic.asked ? loaded(traffic) / traffic.asked : null;
}

// Of several tenants together.
export function together(tenants) {
  const disks = tenants.map(({ ssd }) => ssd).filter((each) => each !== null);
  const traffics = tenants.map(({ traffic }) => traffic);
  const traffic = {};
  for (const name of ["requested", "hit_dram", "hit_ssd", "hit_remote", "asked", "loaded_dram",
    "loaded_ssd", "loaded_remote", "loaded_bytes", "stored", "stored_bytes", "present"]) {
    traffic[name] = sum(traffics, (each) => each[name]);
  }
  for (const name of ["missed", "failed", "refused"]) traffic[name] = added(traffics, (each) => each[name]);
  return {
    traffic,
    used: sum(tenants, ({ dram }) => dram.used_bytes),
    limit: sum(tenants, ({ dram }) => dram.limit_bytes),
    blocks: sum(tenants, ({ dram }) => dram.blocks),
    pinned: sum(tenants, ({ dram }) => dram.pinned_blocks),
    evictions: sum(tenants, ({ dram }) => dram.evictions),
    ssd: disks.length === 0 ? null : {
      used: sum(disks, (each) => each.used_bytes),
      capacity: sum(disks, (each) => each.capacity_bytes),
      blocks: sum(disks, (each) => each.blocks),
      queue: sum(disks, (each) => each.queue_blocks),
      evictions: sum(disks, (each) => each.evictions),
      readOnly: disks.map((each) => each.read_only_reason).find((reason) => reason) ?? "",
    },
  };
}

// Where the curve is at a size; its end for what lies beyond.
export function hitAt(curve, size) {
  const points = curve.points;
  const next = points.findIndex(([each]) => each >= size);
  if (next === -1) return points.at(-1)[1];
  if (next === 0) return points[0][1];
  const [[low, lowHit], [high, highHit]] = [points[next - 1], points[next]];
  return lowHit + (highHit - lowHit) * (size - low) / (high - low);
}

export function curveSentence(curve) {
  if (!curve || curve.now_hit === null || curve.points.length < 2) {
    return ["Not enough reads yet to tell.", ""];
  }
  const twice = hitAt(curve, 2 * curve.now_bytes);
  const gain = 100 * (twice - curve.now_hit);
  const says = gain < 1
    ? `Doubling DRAM would bring nothing: hit ${percent(curve.now_hit)} at ${bytes(curve.now_bytes)} already.`
    : `Doubling DRAM: hit ${percent(curve.now_hit)} → ${percent(twice)}.`;
  const within = curve.error ? `, within ${(100 * curve.error).toFixed(1)} points` : "";
  return [says, `From ${count(curve.references)} references${within}. An SSD, if there is one, stays as it is.`];
}

export function curveSteps(curve) {
  if (!curve || curve.now_hit === null || curve.points.length < 2) return [];
  return [1 / 4, 1 / 2, 1, 2, 4, 8].map((times) => ({
    times,
    size: times * curve.now_bytes,
    hit: times === 1 ? curve.now_hit : hitAt(curve, times * curve.now_bytes),
  }));
}

const ADVICE = {
  "lookup absent": "kvpool explain says why a prefix is not here",
  "get moved": "evicted between lookup and get: more DRAM, or take a lease",
  "get ssd_late": "the disk is slow: look at it, or raise ssd.timeout",
  "get ssd_damaged": "copies on the disk are not whole: look at the disk",
  "get no_room": "on the SSD with no room in DRAM: more DRAM, or fewer leases",
  "get pin_limit": "a client holds its share: it should release earlier",
  "get timed_out": "look at the daemon's log and the load",
  "get disconnected": "the daemon was away, or the network",
  "get damaged": "the network changes bytes: look at it",
  "put pool_pinned": "everything is being read: more DRAM, or fewer leases",
  "put index_full": "more blocks than the index has room for: raise max_blocks",
  "put chain_broken": "behind a block that was not stored: see the others",
  "put timed_out": "another writer of the block did not finish",
  "put no_memory": "the machine has no pages: lower dram, or free some",
  "put too_large": "a block is larger than the pool: raise dram",
  "put not_durable": "in DRAM, but not on the SSD: full, read-only or slow",
  "ssd read": "look at the disk",
  "ssd write": "look at the disk",
  "ssd commit": "look at the disk",
  "ssd damaged": "each was a miss; kvpool ssd verify",
  "ssd late": "the disk is slow: look at it",
};
const ORDINARY = new Set(["lookup behind", "get behind", "get absent"]);

// What went wrong and how often, most frequent first. What follows from another line is left out.
export function trouble(tenants, refused) {
  const { traffic } = together(tenants);
  const disks = tenants.map(({ ssd }) => ssd).filter((each) => each !== null);
  const groups = {
    lookup: traffic.missed,
    get: traffic.failed,
    put: traffic.refused,
    ssd: added(disks, (each) => each.faults),
    connection: refused,
    tenant: added(tenants, (each) => each.refused),
  };
  return Object.entries(groups)
    .flatMap(([what, reasons]) => Object.entries(reasons).map(([reason, times]) => (
      { what, reason: words(reason), times, advice: ADVICE[`${what} ${reason}`] ?? "", key: `${what} ${reason}` })))
    .filter(({ times, key }) => times > 0 && !ORDINARY.has(key))
    .sort((one, other) => other.times - one.times);
}

const TIERS = ["nowhere", "DRAM", "SSD", "DRAM + SSD"];
export const tierNames = (tiers) => (Array.isArray(tiers) ? tiers.join(" + ") : TIERS[tiers] ?? String(tiers));

export const age = (value) => (value < 1 ? "now" : seconds(value));
