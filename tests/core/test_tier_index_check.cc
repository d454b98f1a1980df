// A damaged index file is refused in words, or everything LMDB does with it is harmless and every
// entry that is shown is one that was written.
#include "tier/index_check.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <set>
#include <span>

#include "core_build.h"
#include "core_process.h"
#include "tier/lmdb_layout.h"
#include "tier_index.h"

namespace kvpool {
namespace {

using test::TempDirectory;
constexpr std::uint64_t kMiB = 1 << 20, kPage = lmdb::kPageBytes;
using Image = std::vector<std::byte>;

std::string flaw_of(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  REQUIRE(fd >= 0);
  const auto checked = check_index(fd);
  ::close(fd);
  return checked ? "" : checked.error().message;
}

Image read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  Image image(std::filesystem::file_size(path));
  in.read(reinterpret_cast<char*>(image.data()), static_cast<std::streamsize>(image.size()));
  REQUIRE(in.good());
  return image;
}
void write_file(const std::string& path, const Image& image) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(reinterpret_cast<const char*>(image.data()),
            static_cast<std::streamsize>(image.size()));
  REQUIRE(out.flush().good());
}

template <typename T>
T at(const Image& image, std::uint64_t offset) {
  return lmdb::load<T>(image.data() + offset);
}
template <typename T>
void put(Image& image, std::uint64_t offset, T value) {
  std::memcpy(image.data() + offset, &value, sizeof(value));
}
std::uint64_t meta_page(const Image& image) {
  const auto txn = [&](std::uint64_t page) {
    return at<lmdb::Meta>(image, page * kPage + sizeof(lmdb::PageHeader)).transaction;
  };
  return txn(0) < txn(1) ? 1 : 0;
}
lmdb::Meta meta_in(const Image& image) {
  return at<lmdb::Meta>(image, meta_page(image) * kPage + sizeof(lmdb::PageHeader));
}
std::uint64_t meta_field(const Image& image, std::size_t offset) {
  return meta_page(image) * kPage + sizeof(lmdb::PageHeader) + offset;
}

// A store with a history: namespaces that come and go, and a free list of several records.
class History {
 public:
  History(const std::string& path, std::uint64_t bytes, test::Random& random)
      : path_(path), random_(random) {
    auto made = IndexStore::create(path, test::meta_of(bytes), false);
    REQUIRE(made);
    store_ = std::move(*made);
  }
  void close() { store_.reset(); }
  std::size_t size() const { return live_.size(); }
  // key and entry, as bytes, of all that was ever committed.
  const std::set<std::string>& ever() const { return ever_; }

  void step(std::size_t deletes, std::size_t writes) {
    SsdGroup group;
    for (std::size_t i = 0; i < deletes && !live_.empty(); ++i) {
      std::swap(live_[random_.between<std::size_t>(0, live_.size() - 1)], live_.back());
      group.deletes.push_back(live_.back());
      live_.pop_back();
    }
    if (random_.between(0, 3) == 0 && space_ > 1) group.dropped_spaces.push_back(space_ - 1);
    if (random_.coin()) group.new_spaces.push_back({++space_, test::random_hash(random_), 65536});
    if (random_.coin()) group.new_classes.push_back({4096ull * number_, 8});
    for (std::size_t i = 0; i < writes; ++i) {
      group.writes.push_back(test::random_write(random_, space_, ++number_));
      live_.push_back({group.writes.back().key, group.writes.back().place});
    }
    for (std::size_t i = 0; i < live_.size() / 16; ++i) {
      const auto& [key, place] = live_[random_.between<std::size_t>(0, live_.size() - 1)];
      group.stamps.push_back({key, place, 5, number_});
    }
    const auto applied = store_->apply(group, {});
    REQUIRE_MESSAGE(applied, applied.error().message);
    REQUIRE(flaw_of(path_) == "");
    const auto read = store_->for_each_entry([&](const auto& key, const auto& entry, bool) {
      ever_.insert(test::bytes_of(key) + test::bytes_of(entry));
    });
    REQUIRE(read);
  }

 private:
  std::string path_;
  test::Random& random_;
  std::unique_ptr<IndexStore> store_;
  std::vector<SsdDelete> live_;
  std::set<std::string> ever_;
  std::uint32_t number_ = 0, space_ = 1;
};

TEST_CASE("ssd index check: no file that LMDB has written is refused") {
  const TempDirectory dir(test::memory_folder());
  test::Random random("ssd index check: no file");
  History history(dir / "index.mdb", 8 * kMiB, random);
  CHECK(flaw_of(dir / "index.mdb") == "");
  for (std::size_t i = 0; i < test::scaled(120); ++i) {
    const std::size_t most = random.coin() ? 20 : 1500;
    const auto writes = random.between<std::size_t>(0, history.size() > 6000 ? 0 : most);
    history.step(random.between<std::size_t>(0, most), writes);
  }
  history.step(history.size(), 0);  // empty trees
  history.step(0, 3);
  history.close();
  const auto store = IndexStore::open(dir / "index.mdb", false, IndexStore::Access::write);
  REQUIRE(store);
  REQUIRE((*store)->grow(16 * kMiB, 1, 1));
  CHECK(flaw_of(dir / "index.mdb") == "");
}

// One small index, and what is said of it when one of its numbers is another.
class OneNumber {
 public:
  OneNumber() {
    test::Random random("ssd index check: one number");
    History history(path_, 4 * kMiB, random);
    for (int i = 0; i < 6; ++i) history.step(100, 400);
    history.close();
    whole = read_file(path_);
    // The first record of the main database is that of "blocks": its root, and a leaf below.
    const std::uint64_t main_root = meta_in(whole).main.root * kPage;
    const auto blocks = at<lmdb::Tree>(whole, node(main_root, 0) + sizeof(lmdb::NodeHeader) + 6);
    REQUIRE(blocks.depth == 2);
    root = blocks.root * kPage;
    leaf = at<lmdb::NodeHeader>(whole, node(root, 1)).child() * kPage;
  }
  std::uint64_t node(std::uint64_t page, std::size_t i) const {
    return page + at<std::uint16_t>(whole, page + sizeof(lmdb::PageHeader) + 2 * i);
  }
  template <typename T>
  void check(std::uint64_t offset, T value, const char* told) const {
    Image image = whole;
    put(image, offset, value);
    write_file(path_, image);
    const std::string flaw = flaw_of(path_);
    INFO(flaw);
    CHECK(flaw.find(told) != std::string::npos);
    const auto store = IndexStore::open(path_, false, IndexStore::Access::write);
    CHECK((!store && store.error().code == Code::refused));
  }
  void check_cut(std::uint64_t bytes) const {
    Image image = whole;
    image.resize(bytes);
    write_file(path_, image);
    CHECK(flaw_of(path_) != "");
  }

  Image whole;
  std::uint64_t root = 0, leaf = 0;  // where these pages begin

 private:
  TempDirectory dir_;
  std::string path_ = dir_ / "index.mdb";
};

using u16 = std::uint16_t;
using u64 = std::uint64_t;

TEST_CASE("ssd index check: a meta page with one wrong number is refused in words") {
  const OneNumber one;
  const auto field = [&](std::size_t offset) { return meta_field(one.whole, offset); };
  constexpr std::size_t kMain = offsetof(lmdb::Meta, main), kFree = offsetof(lmdb::Meta, free_list);
  one.check(16, 1u, "not an LMDB file");
  one.check(kPage + 20, 2u, "another version");
  one.check(kPage + 10, u16{2}, "page 1 is not a meta page");
  one.check(field(kFree), 8192u, "pages of 8192 bytes");
  one.check(field(offsetof(lmdb::Meta, last_page)), u64{1 << 20}, "as the last");
  one.check(field(offsetof(lmdb::Meta, map_bytes)), u64{1} << 40, "cut short");
  one.check(field(offsetof(lmdb::Meta, transaction)), u64{99}, "does not follow");
  one.check(field(kMain + 4), u16{4}, "unknown flags");
  one.check(field(kMain + 6), u16{0}, "impossible depth");
  one.check(field(kMain + 6), u16{2}, "not a branch");
  one.check(field(kMain + 32), u64{77}, "pages or entries");
  one.check(field(kMain + 40), meta_in(one.whole).last_page + 1, "but pages are 2..");
  one.check(field(kMain + 40), u64{0}, "but pages are 2..");
  one.check(field(kMain + 40), lmdb::kNoPage, "no root");
  for (const u64 bytes : {u64{0}, u64{100}, kPage, kPage * 9, 4 * kMiB - 1}) one.check_cut(bytes);
}

TEST_CASE("ssd index check: a page with one wrong number is refused in words") {
  const OneNumber one;
  const u64 root = one.root, leaf = one.leaf;
  one.check(root, u64{2}, "says it is page");
  one.check(root + 10, u16{lmdb::kLeaf}, "is not a branch");
  one.check(leaf + 10, u16{lmdb::kLeaf | 0x20}, "is not a leaf");
  one.check(leaf + 12, u16{5000}, "impossible bounds");
  one.check(leaf + 12, u16{16}, "too few keys");
  one.check(leaf + 16, u16{4094}, "outside of it");
  one.check(leaf + 16, u16{17}, "outside of it");
  one.check(leaf + 16, at<u16>(one.whole, leaf + 18), "overlap or leave a gap");
  one.check(one.node(leaf, 0), u16{62}, "value of another size");
  one.check(one.node(leaf, 0) + 2, u16{1}, "does not end in it");
  one.check(one.node(leaf, 0) + 4, u16{lmdb::kSubData}, "where none can be");
  one.check(one.node(leaf, 0) + 4, u16{4}, "unknown kind");
  one.check(one.node(leaf, 0) + 6, u16{18}, "key of another size");
  one.check(one.node(leaf, 0) + 8, ~u64{0}, "out of order");
  one.check(one.node(root, 1),
            static_cast<u16>(at<lmdb::NodeHeader>(one.whole, one.node(root, 2)).child()),
            "belong to another page");
  one.check(one.node(root, 1) + 4, u16{1}, "but pages are 2..");
}

// --- random damage -------------------------------------------------------------------------------

// One kind of damage each; all within the pages that are in use.
class Damage {
 public:
  Damage(Image& image, test::Random& random)
      : image_(image), random_(random), last_(meta_in(image).last_page) {}

  using Kind = void (Damage::*)();
  void flip_bits() {
    for (int i = random_.between(1, 8); i > 0; --i) {
      auto& byte = image_[page() * kPage + random_.between<std::uint64_t>(0, kPage - 1)];
      byte ^= std::byte{1} << random_.between(0, 7);
    }
  }
  void flip_in_meta() {
    auto& byte = image_[random_.between(0, 1) * kPage + random_.between<std::uint64_t>(0, 151)];
    byte ^= std::byte{1} << random_.between(0, 7);
  }
  void set_header() {
    put(image_, page() * kPage + random_.between<std::uint64_t>(0, 30) * 2, any_u16());
  }
  void set_node() {
    const std::uint64_t from = page() * kPage;
    const auto keys = (at<std::uint16_t>(image_, from + 12) - 16u) / 2;
    if (keys == 0 || keys > 2000) return flip_bits();
    const std::uint16_t offset =
        at<std::uint16_t>(image_, from + 16 + 2 * random_.between<std::uint64_t>(0, keys - 1));
    if (offset > kPage - 8) return flip_bits();
    put(image_, from + offset + 2 * random_.between<std::uint64_t>(0, 3), any_u16());
  }
  void set_page_number() {
    const std::uint64_t word = random_.between<std::uint64_t>(0, kPage / 8 - 1);
    put(image_, page() * kPage + word * 8, random_.between<std::uint64_t>(0, last_ + 2));
  }
  void copy_page() { copy(page(), page()); }
  // Content of another page that even says it belongs here.
  void move_page() {
    const std::uint64_t to = page();
    copy(page(), to);
    put(image_, to * kPage, to);
  }
  void swap_pages() {
    const std::uint64_t a = page(), b = page();
    std::swap_ranges(at_page(a), at_page(a) + kPage, at_page(b));
  }
  void zero_page() { std::fill_n(at_page(page()), kPage, std::byte{0}); }
  void scramble_page() {
    for (auto it = at_page(page()), end = it + kPage; it != end; ++it)
      *it = static_cast<std::byte>(random_.between(0, 255));
  }
  void tear_page() {  // half of another page, as a write that did not end
    const std::uint64_t from = page(), to = page(),
                        bytes = 512 * random_.between<std::uint64_t>(1, 7);
    std::copy_n(at_page(from), bytes, at_page(to));
  }
  void cut() { image_.resize(random_.between<std::uint64_t>(0, (last_ + 2) * kPage)); }
  void swap_metas() { std::swap_ranges(at_page(0), at_page(1), at_page(1)); }

  static constexpr std::array<Kind, 13> kKinds = {
      &Damage::flip_bits,       &Damage::flip_in_meta,  &Damage::set_header, &Damage::set_node,
      &Damage::set_page_number, &Damage::copy_page,     &Damage::move_page,  &Damage::swap_pages,
      &Damage::zero_page,       &Damage::scramble_page, &Damage::tear_page,  &Damage::cut,
      &Damage::swap_metas};

 private:
  std::uint64_t page() { return random_.between<std::uint64_t>(0, last_); }
  Image::iterator at_page(std::uint64_t page) {
    return image_.begin() + static_cast<std::ptrdiff_t>(page * kPage);
  }
  void copy(std::uint64_t from, std::uint64_t to) {
    std::copy_n(at_page(from), kPage, at_page(to));
  }
  std::uint16_t any_u16() {
    static constexpr std::array<std::uint16_t, 10> kEdges = {0,  1,  2,    4,    8,
                                                             16, 48, 4095, 4096, 65535};
    if (random_.coin()) return kEdges[random_.between<std::size_t>(0, kEdges.size() - 1)];
    return random_.between<std::uint16_t>(0, 65535);
  }

  Image& image_;
  test::Random& random_;
  std::uint64_t last_;
};

// What became of one damaged file. Everything but the first two is a failure.
enum Outcome : int {
  kServed = 0,
  kRefused = 10,   // not 1: that is how a sanitizer ends a process
  kInvented = 20,  // an entry that was never written
  kUnreadable,     // passed the check, and then LMDB could not read it
  kNotWritable,
  kSpoilt,  // what LMDB made of it does not pass the check any more
};

bool shows_only(const IndexStore& store, const std::set<std::string>& ever, bool& read) {
  bool known = true;
  read = store
             .for_each_entry([&](const BlockKey& key, const BlockEntry& entry, bool holds) {
               if (!holds) return;
               known &= ever.contains(test::bytes_of(key) + test::bytes_of(entry));
             })
             .has_value();
  return known;
}

// In a child: a crash, an abort and a hang have a status of their own.
int use(const std::string& path, const std::set<std::string>& ever, test::Random& random) {
  alarm(60);
  auto opened = IndexStore::open(path, true, IndexStore::Access::write);
  if (!opened) return kRefused;
  IndexStore& store = **opened;
  bool read = false;
  if (!shows_only(store, ever, read)) return kInvented;
  if (!read) return kUnreadable;
  std::vector<BlockKey> keys;
  if (!store.for_each_entry([&](const auto& key, const auto&, bool) { keys.push_back(key); }))
    return kUnreadable;
  store.spaces(), store.classes();
  for (int round = 0; round < 3; ++round) {
    SsdGroup group;
    for (std::uint32_t i = 0; i < 200; ++i)
      group.writes.push_back(test::random_write(random, 1 + i % 30, 100000 + i));
    std::vector<BlockKey> gone;
    for (std::size_t i = 0; i < 300 && !keys.empty(); ++i) {
      std::swap(keys[random.between<std::size_t>(0, keys.size() - 1)], keys.back());
      gone.push_back(keys.back());
      keys.pop_back();
    }
    if (!store.apply(group, gone)) return kNotWritable;
  }
  opened->reset();
  const int fd = ::open(path.c_str(), O_RDONLY);
  return check_index(fd) ? kServed : kSpoilt;
}

void damage_many(const char* name, std::uint64_t bytes, std::size_t entries, std::size_t mutants) {
  const TempDirectory dir(test::memory_folder());
  test::Random random(name);
  History history(dir / "index.mdb", bytes, random);
  while (history.size() < entries) history.step(entries / 16, entries / 4);
  history.step(entries / 4, entries / 8);
  history.close();
  const Image whole = read_file(dir / "index.mdb");
  std::size_t refused = 0, served = 0;
  for (std::size_t i = 0; i < mutants; ++i) {
    Image image = whole;
    Damage damage(image, random);
    const auto kind = random.between<std::size_t>(0, Damage::kKinds.size() - 1);
    (damage.*Damage::kKinds[kind])();
    write_file(dir / "index.mdb", image);
    const int outcome =
        test::status_of_child([&] { return use(dir / "index.mdb", history.ever(), random); });
    INFO("mutant ", i, " of kind ", kind, " ended with ", outcome);
    REQUIRE((outcome == kServed || outcome == kRefused));
    ++(outcome == kServed ? served : refused);
  }
  std::printf("%s: %zu damaged files refused, %zu used without harm\n", name, refused, served);
  // Damage to what nothing refers to, and to the bytes of values, is let through; most is not. Of a
  // sanitizer's few mutants the shares say nothing.
  if (mutants < 100) return;
  CHECK(refused > mutants / 4);
  CHECK(served > 0);
}

TEST_CASE("ssd index check: random damage never reaches LMDB, or does no harm there") {
  const char* given = std::getenv("KVPOOL_MUTANTS");
  const std::size_t mutants = given != nullptr ? std::strtoull(given, nullptr, 10) : 450;
  damage_many("ssd index check: damage, small", 4 * kMiB, 2000, test::scaled(mutants));
  damage_many("ssd index check: damage, long free list", 32 * kMiB, 20000,
              test::scaled(mutants) / 3);
}

}  // namespace
}  // namespace kvpool
