#include "policy/reuse.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/check.h"

namespace kvpool {
namespace {

constexpr std::uint32_t kExactSamples = 1 << 12;  // at first
constexpr double kHalfLivesMax = 64;              // of weight_, then everything is scaled down
constexpr double kAllNames = 0x1p64;
constexpr double kSigmas = 1;  // what the samples' own variance explains; measured, see the tests

// Of the samples there may be: so many new ones come between two passes over all of them.
constexpr std::uint32_t kRoomInverse = 8;

}  // namespace

Reuse::Reuse(const ReuseOptions& options) : options_(options), is_exact_(options.samples_max == 0) {
  KVP_CHECK(is_exact_ || (options.samples_max >= 64 && std::has_single_bit(options.samples_max)));
  resize(is_exact_ ? kExactSamples : options.samples_max);
}

// Only ever longer. A third of the places is spent between two rebuilds, at least.
void Reuse::resize(std::uint32_t samples_max) {
  samples_max_ = samples_max;
  places_ = samples_max + samples_max / 2;
  samples_.extend(places_);
  sums_.extend(places_);
  table_.extend(std::size_t{2} * samples_max);
}

// --- a use ---------------------------------------------------------------------------------------

void Reuse::use(std::uint64_t hash, std::uint32_t bytes, Seconds now, bool counts) {
  advance(now);
  if (next_ == places_ || is_full()) {
    rebuild();
    if (hash >= threshold_) return;  // no more, and what it would have counted is corrected
  }
  const std::uint64_t at = find(hash);
  if (counts) {
    count_references();
    sampled_ += weight_;
  }
  Sample latest{hash, std::max(bytes, 1u), 0};
  std::size_t bin = kCold;
  if (table_[at] != 0) {
    const Place place = table_[at] - 1;
    Sample& before = samples_[place];
    const std::uint64_t since = bytes_ - bytes_until(place);
    bin = bin_of(static_cast<double>(since) / rate() + static_cast<double>(bytes));
    add_bytes(place, -std::int64_t{before.bytes});
    bytes_ -= before.bytes;
    before.bytes = 0;
    latest.uses = before.uses;
  } else {
    ++samples_used_;
  }
  if (counts) {
    count(bin, double{latest.uses});
    latest.uses += static_cast<float>(weight_);
  }
  table_[at] = next_ + 1;
  samples_[next_] = latest;
  add_bytes(next_, latest.bytes);
  bytes_ += latest.bytes;
  ++next_;
}

std::size_t Reuse::bin_of(double distance_bytes) {
  const double bin = std::ceil((std::log2(distance_bytes) - kLowestLog2) * kBinsPerDoubling);
  return static_cast<std::size_t>(std::clamp(bin, 0.0, static_cast<double>(kBins - 1)));
}

// One more use makes the square of a block's uses larger by so much; see corrected().
void Reuse::count(std::size_t bin, double uses_before) {
  const double stands_for = 1 / rate();
  counts_[bin] += weight_ * stands_for;
  doubts_[bin] += (2 * uses_before + weight_) * weight_ * stands_for * (stands_for - 1);
}

double Reuse::bound_bytes(std::size_t bin) {
  return std::exp2(kLowestLog2 + static_cast<double>(bin) / kBinsPerDoubling);
}

void Reuse::count_references() {
  references_ += static_cast<double>(uncounted_) * weight_;
  uncounted_ = 0;
}

double Reuse::rate() const { return is_exact_ ? 1 : static_cast<double>(threshold_) / kAllNames; }

void Reuse::drop(std::uint64_t hash) {
  const std::uint64_t at = find(hash);
  if (table_[at] == 0) return;
  const Place place = table_[at] - 1;
  add_bytes(place, -std::int64_t{samples_[place].bytes});
  bytes_ -= samples_[place].bytes;
  samples_[place].bytes = 0;
  take_out(at);
  --samples_used_;
}

void Reuse::forget_all() {
  for (Place place = 0; place < next_; ++place) samples_[place].bytes = 0;
  rebuild();
}

// --- all samples ---------------------------------------------------------------------------------

// Numbers the samples anew from 0 on, without those that are followed no more.
void Reuse::rebuild() {
  if (is_full() && !is_exact_) make_room();
  Place kept = 0;
  for (Place place = 0; place < next_; ++place)
    if (samples_[place].bytes != 0) samples_[kept++] = samples_[place];
  next_ = samples_used_ = kept;
  if (is_full()) resize(samples_max_ * 2);
  bytes_ = 0;
  std::fill_n(&sums_[0], places_, 0);
  std::fill_n(&table_[0], table_.length_max(), 0);
  for (Place place = 0; place < kept; ++place) {
    table_[find(samples_[place].hash)] = place + 1;
    bytes_ += samples_[place].bytes;
    sums_[place] += samples_[place].bytes;
    const std::uint64_t above = place | (place + std::uint64_t{1});
    if (above < places_) sums_[above] += sums_[place];
  }
  // The tree goes on over places that nobody has yet.
  for (std::uint64_t place = kept; place < places_; ++place) {
    const std::uint64_t above = place | (place + 1);
    if (above < places_) sums_[above] += sums_[place];
  }
}

// Those farthest back that no size asked for reaches, then those of the highest hashes.
void Reuse::make_room() {
  const std::uint32_t wanted = samples_max_ - samples_max_ / kRoomInverse;
  std::uint32_t left = count_below(threshold_);
  const double reach = options_.reach_bytes == 0
                           ? static_cast<double>(bytes_)
                           : static_cast<double>(options_.reach_bytes) * rate();
  auto behind = static_cast<double>(bytes_);
  for (Place place = 0; place < next_ && behind > reach; ++place) {
    if (samples_[place].bytes == 0) continue;
    behind -= samples_[place].bytes;
    samples_[place].bytes = 0;
    --left;
  }
  std::uint64_t threshold = threshold_;
  while (left > wanted && threshold > 1) {
    threshold -= std::max<std::uint64_t>(threshold / kRoomInverse, 1);
    left = count_below(threshold);
  }
  if (threshold == threshold_) return;
  threshold_ = threshold;
  for (Place place = 0; place < next_; ++place)
    if (samples_[place].hash >= threshold) samples_[place].bytes = 0;
}

std::uint32_t Reuse::count_below(std::uint64_t threshold) const {
  std::uint32_t count = 0;
  for (Place place = 0; place < next_; ++place)
    count += samples_[place].bytes != 0 && samples_[place].hash < threshold;
  return count;
}

// --- the table -----------------------------------------------------------------------------------

// Followed hashes are all small: their low half says where.
std::uint64_t Reuse::home(std::uint64_t hash) const {
  return (hash * 0xd6e8'feb8'6659'fd93u >> 32) & (table_.length_max() - 1);
}

std::uint64_t Reuse::find(std::uint64_t hash) const {
  std::uint64_t at = home(hash);
  while (table_[at] != 0 && samples_[table_[at] - 1].hash != hash)
    at = (at + 1) & (table_.length_max() - 1);
  return at;
}

// What was pushed past the emptied place moves back, so that no search ends too early.
void Reuse::take_out(std::uint64_t at) {
  const std::uint64_t mask = table_.length_max() - 1;
  std::uint64_t hole = at;
  for (std::uint64_t next = (at + 1) & mask; table_[next] != 0; next = (next + 1) & mask) {
    const std::uint64_t from = home(samples_[table_[next] - 1].hash);
    if (((next - from) & mask) < ((next - hole) & mask)) continue;
    table_[hole] = table_[next];
    hole = next;
  }
  table_[hole] = 0;
}

// --- sums over places ----------------------------------------------------------------------------

void Reuse::add_bytes(Place place, std::int64_t bytes) {
  for (std::uint64_t at = place; at < places_; at |= at + 1)
    sums_[at] += static_cast<std::uint64_t>(bytes);
}

std::uint64_t Reuse::bytes_until(Place place) const {
  std::uint64_t bytes = 0;
  for (std::int64_t at = place; at >= 0; at = (at & (at + 1)) - 1)
    bytes += sums_[static_cast<std::size_t>(at)];
  return bytes;
}

// --- time and the curve --------------------------------------------------------------------------

void Reuse::advance(Seconds now) {
  if (!std::isfinite(now)) return;
  if (!is_started_) {
    is_started_ = true;
    now_ = origin_ = now;
  }
  if (now <= now_ || options_.half_life_s <= 0) return;
  now_ = now;
  const double half_lives = (now - origin_) / options_.half_life_s;
  weight_ = std::exp2(half_lives);
  if (half_lives < kHalfLivesMax) return;
  const double shrunk = std::exp2(-half_lives);  // 0 after a very long pause: all has faded
  references_ *= shrunk;
  sampled_ *= shrunk;
  for (double& count : counts_) count *= shrunk;
  for (double& doubt : doubts_) doubt *= shrunk * shrunk;
  for (Place place = 0; place < next_; ++place) samples_[place].uses *= static_cast<float>(shrunk);
  origin_ = now;
  weight_ = 1;
}

ReuseCurve Reuse::curve(Seconds now) const {
  ReuseCurve curve;
  // As of `now`: the weight that a use would have.
  double unit = 1 / weight_;
  if (is_started_ && std::isfinite(now) && now > now_ && options_.half_life_s > 0)
    unit /= std::exp2((now - now_) / options_.half_life_s);
  curve.references = (references_ + static_cast<double>(uncounted_) * weight_) * unit;
  curve.sampled = sampled_ * unit;
  curve.samples = samples_used_;
  curve.rate = rate();
  curve.seen_bytes = static_cast<double>(bytes_) / curve.rate;
  const std::array<double, kBins + 1> counts = corrected(curve.references / unit);
  curve.cold = counts[kCold] * unit;
  std::size_t used = kBins;
  while (used > 0 && counts[used - 1] == 0) --used;
  for (std::size_t bin = 0; bin < used; ++bin) {
    curve.bounds_bytes.push_back(bound_bytes(bin));
    curve.counts.push_back(counts[bin] * unit);
  }
  return curve;
}

// How many uses there were in all is known, and what the samples stand for is more or less than
// that: it depends on whether blocks that are used all the time are among them. What is missing, or
// too much, goes to the bins by their covariance with the sum, as far as the samples' own variance
// explains it. What is missing beyond that belongs to some block in use all the time, of which no
// sample tells, and so to the shortest distance. (SHARDS-adj gives all of it to that one.)
std::array<double, Reuse::kBins + 1> Reuse::corrected(double references) const {
  std::array<double, kBins + 1> counts = counts_;
  double missing = references, variance = 0, sum = 0;
  for (const double count : counts_) missing -= count;
  for (const double doubt : doubts_) variance += doubt;
  const double explained = std::min(missing, kSigmas * std::sqrt(variance));
  if (variance > 0)
    for (std::size_t bin = 0; bin <= kCold; ++bin)
      counts[bin] = std::max(counts[bin] + explained * doubts_[bin] / variance, 0.0);
  counts[0] += std::max(missing - explained, 0.0);
  for (const double count : counts) sum += count;
  if (sum > 0)
    for (double& count : counts) count *= references / sum;
  return counts;
}

std::size_t Reuse::bytes() const {
  return sizeof(*this) + places_ * (sizeof(Sample) + sizeof(std::uint64_t)) +
         table_.length_max() * sizeof(std::uint32_t);
}

void Reuse::check_invariants() const {
  std::uint64_t bytes = 0;
  std::uint32_t samples = 0, entries = 0;
  for (Place place = 0; place < next_; ++place) {
    const Sample& sample = samples_[place];
    bytes += sample.bytes;
    KVP_CHECK(bytes_until(place) == bytes);
    if (sample.bytes == 0) continue;
    ++samples;
    KVP_CHECK(sample.hash < threshold_ || is_exact_);
    KVP_CHECK(table_[find(sample.hash)] == place + 1);
  }
  for (std::size_t at = 0; at < table_.length_max(); ++at) entries += table_[at] != 0;
  KVP_CHECK(bytes == bytes_ && samples == samples_used_ && entries == samples);
  KVP_CHECK(samples_used_ <= samples_max_);
}

}  // namespace kvpool
