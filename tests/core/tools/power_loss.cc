// kvpool_power_loss: what is left of an SSD tier when the power goes at any moment?
//
//   kvpool_power_loss --directory=D [--load=tier|node] [--contract=durable|async|relaxed]
//                     [--broken=B] [--policy=temperature|lru] [--images=N] [--seed=S]
//
// Drives a tier in D/tier, and at random moments, inside commits as well, makes an image of what a
// power cut would leave, opens it with the real tier and looks at all of it. Prints its seed and a
// line of JSON with what it found; the exit status says only whether it could look.
//
// Broken on purpose, to show that it would be found (early_reuse, hasty_reuse: load `tier` only):
//   early_reuse     an extent is written again before the commit that deletes its entry
//   no_payload_sync flushes of the slab file do nothing
//   no_index_sync   flushes of the index do nothing, as with MDB_NOSYNC
//   hasty_reuse     `relaxed`, with extents free after the deleting commit instead of the next one
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>

#include "base/check.h"
#include "image_check.h"
#include "node_load.h"
#include "tier_load.h"

namespace kvpool::test {
namespace {

constexpr std::uint64_t kUnits = 4;  // of payload: two sizes of block, and two to give back
constexpr std::uint64_t kCapacityBytes = 10 << 20;  // and the index, of 1.1 MiB
constexpr double kMomentShare = 0.08;
constexpr int kReopenEvery = 25;  // steps
constexpr int kStepsMax = 100'000;

struct Arguments {
  std::string directory, load = "tier", contract = "durable", broken = "none",
                         policy = "temperature";
  std::uint64_t images = 300, seed = 1;
};

struct Findings {
  std::uint64_t images = 0, in_commit = 0, has_open_commit = 0, has_newest = 0, has_older = 0;
  std::uint64_t refused = 0, crashed = 0, hung = 0, no_state = 0, lost_too_much = 0;
  int lost_max = 0;
  std::uint64_t entries = 0, wrong = 0, damaged = 0, failed = 0, doubled = 0, orphans = 0,
                bad_images = 0;
  std::string why;

  void add(const Verdict& verdict, bool is_committing, int may_lose);
};

void Findings::add(const Verdict& verdict, bool is_committing, int may_lose) {
  using End = Verdict::End;
  ++images;
  in_commit += is_committing;
  const bool is_complete = verdict.end == End::complete;
  refused += verdict.end == End::refused;
  crashed += verdict.end == End::crashed;
  hung += verdict.end == End::hung;
  if (verdict.end == End::refused && why.empty()) why = verdict.why;
  const bool has_state = is_complete && verdict.is_a_state;
  no_state += is_complete && !has_state;
  if (has_state) {
    has_open_commit += verdict.commits_lost < 0;
    has_newest += verdict.commits_lost == 0;
    has_older += verdict.commits_lost > 0;
    lost_too_much += verdict.commits_lost > may_lose || !verdict.is_promise_kept;
    lost_max = std::max(lost_max, verdict.commits_lost);
  }
  entries += verdict.entries;
  wrong += verdict.wrong;
  damaged += verdict.damaged;
  failed += verdict.failed;
  doubled += verdict.doubled;
  orphans += verdict.orphans;
  const std::uint64_t faults =
      verdict.wrong + verdict.damaged + verdict.failed + verdict.doubled + verdict.orphans;
  bad_images +=
      !has_state || verdict.commits_lost > may_lose || !verdict.is_promise_kept || faults > 0;
}

class Run {
 public:
  explicit Run(const Arguments& arguments);
  void go();
  void print() const;

 private:
  SsdOptions options() const;
  void format();
  void look();
  template <typename Load>
  void drive(Load& load);

  const Arguments arguments_;
  const std::string tier_, image_;
  Durability durability_ = Durability::durable;
  Reuse reuse_ = Reuse::after_commit;
  Disk::Deaf deaf_ = Disk::Deaf::no;
  Dice dice_;
  Findings found_;
  std::uint64_t differing_ = 0, wrong_gets_ = 0, not_kept_ = 0, puts_ = 0, hits_ = 0, moves_ = 0;
};

template <typename Value>
Value chosen(const char* option, const std::string& given,
             const std::map<std::string, Value>& values) {
  const auto found = values.find(given);
  if (found != values.end()) return found->second;
  std::fprintf(stderr, "%s cannot be '%s'\n", option, given.c_str());
  std::exit(2);
}

Run::Run(const Arguments& arguments)
    : arguments_(arguments),
      tier_(arguments.directory + "/tier"),
      image_(arguments.directory + "/image"),
      dice_(arguments.seed) {
  durability_ = chosen<Durability>("--contract", arguments.contract,
                                   {{"durable", Durability::durable},
                                    {"async", Durability::async},
                                    {"relaxed", Durability::relaxed}});
  if (durability_ == Durability::relaxed) reuse_ = Reuse::after_next_commit;
  reuse_ = chosen<Reuse>("--broken", arguments.broken,
                         {{"none", reuse_},
                          {"no_payload_sync", reuse_},
                          {"no_index_sync", reuse_},
                          {"early_reuse", Reuse::before_commit},
                          {"hasty_reuse", Reuse::after_commit}});
  if (arguments.broken == "no_payload_sync") deaf_ = Disk::Deaf::to_slab_flushes;
  if (arguments.broken == "no_index_sync") deaf_ = Disk::Deaf::to_index_flushes;
}

SsdOptions Run::options() const {
  SsdOptions options;
  options.path = tier_;
  options.capacity_bytes = kCapacityBytes;
  options.durability = durability_;
  options.io_threads = 2;
  options.direct = arguments_.load == "node";  // either way it is the same calls
  return options;
}

// Before anything is followed: a tier that was formatted and closed in peace.
void Run::format() {
  std::filesystem::create_directories(image_);
  auto formatted = Ssd::open(options());
  if (!formatted) {
    std::fprintf(stderr, "%s\n", formatted.error().message.c_str());
    std::exit(2);
  }
  KVP_CHECK((*formatted)->facts().units == kUnits);
  formatted->reset();
  const std::string names[] = {kSlabsName, kIndexName};
  Disk::instance().watch(tier_, names, deaf_);
  Expected::instance().follow(tier_ + "/" + kIndexName);
  Disk::instance().at_moments(kMomentShare, arguments_.seed + 1, [this] { look(); });
}

void Run::look() {
  if (found_.images >= arguments_.images) return;
  Disk::instance().write_image(image_, dice_);
  const bool chains = arguments_.load == "node";
  const Verdict verdict = check_image(image_, durability_, chains);
  found_.add(verdict, Expected::instance().is_committing(),
             durability_ == Durability::relaxed ? 1 : 0);
  // LMDB's lock file says which processes have it open; a new machine has none.
  std::filesystem::remove(image_ + "/" + kIndexName + "-lock");
}

template <typename Load>
void Run::drive(Load& load) {
  for (int step = 1; step <= kStepsMax && found_.images < arguments_.images; ++step) {
    load.step();
    Disk::instance().moment();
    if (step % kReopenEvery == 0) load.reopen();
  }
}

void Run::go() {
  format();
  if (arguments_.load == "node") {
    const auto policy =
        chosen<PolicyKind>("--policy", arguments_.policy,
                           {{"temperature", PolicyKind::temperature}, {"lru", PolicyKind::lru}});
    NodeLoad load(options(), policy, arguments_.seed + 2);
    drive(load);
    load.reopen();
    wrong_gets_ = load.wrong();
    not_kept_ = load.not_kept();
    puts_ = load.puts();
    hits_ = load.hits();
    moves_ = load.moves();
  } else {
    TierLoad load(options(), reuse_, arguments_.seed + 2);
    drive(load);
    differing_ = load.differing();
  }
}

void Run::print() const {
  const Findings& f = found_;
  const std::pair<const char*, std::uint64_t> numbers[] = {
      {"images", f.images},
      {"bad_images", f.bad_images},
      {"in_commit", f.in_commit},
      {"has_open_commit", f.has_open_commit},
      {"has_newest", f.has_newest},
      {"has_older", f.has_older},
      {"lost_max", static_cast<std::uint64_t>(f.lost_max)},
      {"lost_too_much", f.lost_too_much},
      {"refused", f.refused},
      {"crashed", f.crashed},
      {"hung", f.hung},
      {"no_state", f.no_state},
      {"entries", f.entries},
      {"wrong", f.wrong},
      {"damaged", f.damaged},
      {"failed", f.failed},
      {"doubled", f.doubled},
      {"orphans", f.orphans},
      {"groups", Expected::instance().newest().groups},
      {"recycled", Expected::instance().recycled()},
      {"unheard_bytes", Disk::instance().unheard_bytes()},
      {"differing", differing_},
      {"wrong_gets", wrong_gets_},
      {"not_kept", not_kept_},
      {"puts", puts_},
      {"hits", hits_},
      {"moves", moves_},
  };
  std::printf("{\"load\": \"%s\", \"contract\": \"%s\", \"broken\": \"%s\", \"seed\": %" PRIu64,
              arguments_.load.c_str(), arguments_.contract.c_str(), arguments_.broken.c_str(),
              arguments_.seed);
  for (const auto& [name, value] : numbers) std::printf(", \"%s\": %" PRIu64, name, value);
  std::printf("}\n");
  if (!f.why.empty()) std::fprintf(stderr, "first refusal: %s\n", f.why.c_str());
}

Arguments parse(int count, char** words) {
  Arguments arguments;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    const std::size_t equals = word.find('=');
    const std::string name = word.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : word.substr(equals + 1);
    const std::map<std::string, std::string*> texts = {{"--directory", &arguments.directory},
                                                       {"--load", &arguments.load},
                                                       {"--contract", &arguments.contract},
                                                       {"--broken", &arguments.broken},
                                                       {"--policy", &arguments.policy}};
    const std::map<std::string, std::uint64_t*> numbers = {{"--images", &arguments.images},
                                                           {"--seed", &arguments.seed}};
    if (const auto text = texts.find(name); text != texts.end())
      *text->second = value;
    else
      *chosen("the option", name, numbers) = std::strtoull(value.c_str(), nullptr, 10);
  }
  if (!arguments.directory.empty()) return arguments;
  std::fprintf(stderr, "--directory is needed\n");
  std::exit(2);
}

}  // namespace
}  // namespace kvpool::test

int main(int count, char** words) {
  using namespace kvpool::test;
  Run run(parse(count, words));
  run.go();
  run.print();
  return 0;
}
