#include "tier/index_check.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bitset>
#include <cerrno>
#include <compare>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tier/lmdb_layout.h"
#include "tier/ssd_format.h"

namespace kvpool {
namespace {

using lmdb::load;
using Bytes = std::span<const std::byte>;
using Page = std::array<std::byte, lmdb::kPageBytes>;

std::unexpected<Error> damaged(const std::string& what) {
  return fail(Code::refused, "is damaged: " + what);
}
std::unexpected<Error> damaged(std::uint64_t page, const std::string& what) {
  return damaged("page " + std::to_string(page) + " " + what);
}

std::strong_ordering compare_bytes(Bytes a, Bytes b) {
  const int order = std::memcmp(a.data(), b.data(), std::min(a.size(), b.size()));
  return order != 0 ? order <=> 0 : a.size() <=> b.size();
}

// A node, taken apart. Nothing in it may be used before PageView has seen that it fits.
struct Node {
  lmdb::NodeHeader header;
  const std::byte* at = nullptr;
  Bytes key() const { return {at + sizeof(header), header.key_bytes}; }
  const std::byte* value() const { return at + sizeof(header) + header.key_bytes; }
};

// What kind of tree a page belongs to.
struct Kind {
  std::string name;
  bool is_free_list = false, is_main = false;
  std::size_t key_bytes = 0, value_bytes = 0;  // 0 = any

  std::strong_ordering compare(Bytes a, Bytes b) const {
    if (!is_free_list) return compare_bytes(a, b);
    return load<std::uint64_t>(a.data()) <=> load<std::uint64_t>(b.data());
  }
};

// What a record of the main database says of a database of its own. A name that is not ours is not
// repeated: it may be any bytes.
Kind named(std::string_view name) {
  if (name == "blocks")
    return {.name = "blocks", .key_bytes = sizeof(BlockKey), .value_bytes = sizeof(BlockEntry)};
  if (name == "spaces")
    return {.name = "spaces", .key_bytes = 4, .value_bytes = sizeof(SpaceRecord)};
  if (name == "classes") return {.name = "classes", .key_bytes = 8, .value_bytes = 8};
  if (name == "meta") return {.name = "meta"};
  return {.name = "other database"};
}

// One branch or leaf page: its nodes lie in it, side by side, with keys in order.
class PageView {
 public:
  PageView(const Page& page, bool is_leaf)
      : page_(page), header_(load<lmdb::PageHeader>(page.data())), is_leaf_(is_leaf) {}

  // What is wrong with it; empty = nothing, and only then the nodes may be looked at.
  std::string flaw(std::uint64_t number, const Kind& kind) const {
    if (header_.number != number) return "says it is page " + std::to_string(header_.number);
    if (header_.flags != (is_leaf_ ? lmdb::kLeaf : lmdb::kBranch))
      return is_leaf_ ? "is not a leaf" : "is not a branch";
    if (header_.lower < sizeof(header_) || header_.lower % 2 != 0 ||
        header_.lower > header_.upper || header_.upper > page_.size())
      return "has impossible bounds";
    // LMDB stops the process at a branch of one, but not in the free list.
    if (count() < (is_leaf_ || kind.is_free_list ? 1 : 2)) return "has too few keys";
    if (std::string what = flaw_of_nodes(kind); !what.empty()) return what;
    return flaw_of_order(kind);
  }

  std::size_t count() const { return (header_.lower - sizeof(header_)) / 2; }
  Node node(std::size_t i) const { return node_at(offset(i)); }
  // Keys of a branch begin at its second node: the first child has all that is below.
  std::size_t first_key() const { return is_leaf_ ? 0 : 1; }

 private:
  std::size_t offset(std::size_t i) const {
    return load<std::uint16_t>(page_.data() + sizeof(header_) + 2 * i);
  }

  Node node_at(std::size_t offset) const {
    const std::byte* at = page_.data() + offset;
    return {load<lmdb::NodeHeader>(at), at};
  }

  std::size_t value_bytes(const lmdb::NodeHeader& header) const {
    if (!is_leaf_) return 0;
    return header.flags & lmdb::kBigData ? sizeof(std::uint64_t) : header.value_bytes();
  }

  static std::size_t bytes_of(const Node& each, std::size_t value_bytes) {
    return sizeof(each.header) + each.header.key_bytes + value_bytes;
  }

  std::string flaw_of_nodes(const Kind& kind) const {
    std::bitset<lmdb::kPageBytes / 2> starts;  // nodes begin at even offsets
    for (std::size_t i = 0; i < count(); ++i) {
      const std::size_t at = offset(i);
      if (at < header_.upper || at % 2 != 0 || at + sizeof(lmdb::NodeHeader) > page_.size())
        return "has a node outside of it";
      const Node each = node_at(at);
      if (at + bytes_of(each, value_bytes(each.header)) > page_.size())
        return "has a node that does not end in it";
      if (std::string what = flaw_of_node(each, i, kind); !what.empty()) return what;
      starts.set(at / 2);
    }
    return are_side_by_side(starts) ? "" : "has nodes that overlap or leave a gap";
  }

  // From the first to the end of the page, each node begins where the one before it ends.
  bool are_side_by_side(const std::bitset<lmdb::kPageBytes / 2>& starts) const {
    std::size_t nodes = 0, end = header_.upper;
    for (; end < page_.size() && end % 2 == 0 && starts[end / 2]; ++nodes) {
      const Node each = node_at(end);
      end += (bytes_of(each, value_bytes(each.header)) + 1) / 2 * 2;
    }
    return nodes == count() && end == page_.size();
  }

  std::string flaw_of_node(const Node& each, std::size_t i, const Kind& kind) const {
    const std::size_t key_bytes = each.header.key_bytes;
    if (i >= first_key()) {
      if (key_bytes == 0 || key_bytes > lmdb::kKeyBytesMax) return "has a key of impossible size";
      if (kind.is_free_list && key_bytes != sizeof(std::uint64_t))
        return "has a key that is no transaction";
      if (is_leaf_ && kind.key_bytes != 0 && key_bytes != kind.key_bytes)
        return "has a key of another size";
    }
    if (!is_leaf_) return "";
    const std::uint16_t flags = each.header.flags;
    if (flags == lmdb::kSubData)
      return kind.is_main && each.header.value_bytes() == sizeof(lmdb::Tree)
                 ? ""
                 : "has a database where none can be";
    if (flags != 0 && flags != lmdb::kBigData) return "has a record of unknown kind";
    if (kind.value_bytes != 0 && each.header.value_bytes() != kind.value_bytes)
      return "has a value of another size";
    return "";
  }

  std::string flaw_of_order(const Kind& kind) const {
    for (std::size_t i = first_key() + 1; i < count(); ++i)
      if (kind.compare(node(i - 1).key(), node(i).key()) >= 0) return "has keys out of order";
    return "";
  }

  const Page& page_;
  lmdb::PageHeader header_;
  bool is_leaf_;
};

class IndexCheck {
 public:
  explicit IndexCheck(int fd) : fd_(fd) {}

  Result<void> run() {
    if (const auto good = measure(); !good) return good;
    if (const auto good = choose_meta(); !good) return good;
    seen_.assign(meta_.last_page + 1, false);
    seen_[0] = seen_[1] = true;
    pages_.resize(lmdb::kDepthMax);
    // In the order of the file, so that the walk below finds it all in the page cache.
    posix_fadvise(fd_, 0, static_cast<off_t>((meta_.last_page + 1) * lmdb::kPageBytes),
                  POSIX_FADV_WILLNEED);
    if (const auto good = check_tree(meta_.main, {.name = "main database", .is_main = true}); !good)
      return good;
    for (const auto& [name, tree] : named_)
      if (const auto good = check_tree(tree, named(name)); !good) return good;
    return check_tree(meta_.free_list, {.name = "free list", .is_free_list = true});
  }

 private:
  struct Walk {
    const Kind& kind;
    std::size_t depth;
    lmdb::Tree found;  // counted on the way
  };
  struct Range {
    Bytes low, high;  // no data = no bound
  };

  Result<void> measure() {
    struct stat status;
    if (::fstat(fd_, &status) != 0 || status.st_size < 0) return unreadable(errno);
    file_pages_ = static_cast<std::uint64_t>(status.st_size) / lmdb::kPageBytes;
    if (file_pages_ >= 2) return {};
    return fail(Code::refused, "is not an LMDB file: it is shorter than two pages");
  }

  static std::unexpected<Error> unreadable(int code) {
    return fail(Code::no_resource, std::string("cannot be read: ") + std::strerror(code));
  }

  Result<void> read(std::uint64_t page, std::span<std::byte> into) const {
    const auto from = static_cast<off_t>(page * lmdb::kPageBytes);
    for (std::size_t done = 0; done < into.size();) {
      const ssize_t got =
          ::pread(fd_, into.data() + done, into.size() - done, from + static_cast<off_t>(done));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return unreadable(errno);
      if (got == 0) return damaged(page, "is behind the end of the file");
      done += static_cast<std::size_t>(got);
    }
    return {};
  }

  // --- meta pages ---

  Result<void> choose_meta() {
    std::array<lmdb::Meta, 2> metas;
    for (std::size_t i = 0; i < 2; ++i) {
      Page page;
      if (const auto got = read(i, page); !got) return got;
      metas[i] = load<lmdb::Meta>(page.data() + sizeof(lmdb::PageHeader));
      const auto header = load<lmdb::PageHeader>(page.data());
      if (const auto good = check_meta(i, header, metas[i]); !good) return good;
    }
    const std::uint64_t first = metas[0].transaction, second = metas[1].transaction;
    const std::uint64_t newest = first < second ? 1 : 0;
    meta_ = metas[newest];
    if (first == 0 && second == 0) return {};  // nothing was ever committed
    // From then on the two are written in turn. The highest bits stay free: counting never wraps.
    const bool in_turn = std::max(first, second) - std::min(first, second) == 1;
    if (!in_turn || (meta_.transaction & 1) != newest || meta_.transaction >> 62 != 0)
      return damaged(newest, "does not follow the other meta page");
    return {};
  }

  Result<void> check_meta(std::uint64_t i, const lmdb::PageHeader& header,
                          const lmdb::Meta& meta) const {
    if (meta.magic != lmdb::kMagic) return fail(Code::refused, "is not an LMDB file");
    if (meta.version != lmdb::kVersion)
      return fail(Code::refused, "is an LMDB file of another version");
    if (meta.free_list.pad != lmdb::kPageBytes)
      return fail(Code::refused, "has pages of " + std::to_string(meta.free_list.pad) +
                                     " bytes; this kvpool reads pages of 4096");
    if (header.number != i || header.flags != lmdb::kMeta) return damaged(i, "is not a meta page");
    if (meta.map_bytes > file_pages_ * lmdb::kPageBytes)
      return damaged("it is cut short: it has " + std::to_string(file_pages_ * lmdb::kPageBytes) +
                     " bytes of " + std::to_string(meta.map_bytes));
    if (meta.last_page < 1 || meta.last_page >= file_pages_)
      return damaged(i, "names page " + std::to_string(meta.last_page) +
                            " as the last, but the file has " + std::to_string(file_pages_));
    return {};
  }

  // --- trees ---

  Result<void> claim(std::uint64_t page, std::uint64_t count, const std::string& by) {
    if (page < 2 || page > meta_.last_page || count > meta_.last_page - page + 1)
      return damaged(
          page, "is named by the " + by + ", but pages are 2.." + std::to_string(meta_.last_page));
    for (std::uint64_t i = page; i < page + count; ++i) {
      if (seen_[i]) return damaged(i, "is named by the " + by + ", but is in use elsewhere");
      seen_[i] = true;
    }
    return {};
  }

  Result<void> check_tree(const lmdb::Tree& tree, const Kind& kind) {
    if ((tree.flags & lmdb::kOrderFlags) != (kind.is_free_list ? lmdb::kIntegerKey : 0))
      return damaged("the " + kind.name + " has unknown flags");
    Walk walk{kind, tree.depth, {}};
    if (tree.root == lmdb::kNoPage) {
      if (tree.depth != 0) return damaged("the " + kind.name + " has no root");
    } else {
      if (tree.depth < 1 || tree.depth > lmdb::kDepthMax)
        return damaged("the " + kind.name + " has an impossible depth");
      if (const auto good = check_page(walk, tree.root, 1, {}); !good) return good;
    }
    if (walk.found.branch_pages != tree.branch_pages || walk.found.leaf_pages != tree.leaf_pages ||
        walk.found.overflow_pages != tree.overflow_pages || walk.found.entries != tree.entries)
      return damaged("the " + kind.name + " does not have the pages or entries it should have");
    return {};
  }

  Result<void> check_page(Walk& walk, std::uint64_t number, std::size_t level, Range range) {
    if (const auto mine = claim(number, 1, walk.kind.name); !mine) return mine;
    Page& page = pages_[level - 1];
    if (const auto got = read(number, page); !got) return got;
    const bool is_leaf = level == walk.depth;
    const PageView view(page, is_leaf);
    if (const std::string flaw = view.flaw(number, walk.kind); !flaw.empty())
      return damaged(number, "(" + walk.kind.name + ") " + flaw);
    if (!lies_in(view, range, walk.kind))
      return damaged(number, "(" + walk.kind.name + ") has keys that belong to another page");
    return is_leaf ? check_leaf(walk, view) : check_children(walk, view, level, range);
  }

  static bool lies_in(const PageView& view, const Range& range, const Kind& kind) {
    if (view.count() <= view.first_key()) return true;
    const Bytes first = view.node(view.first_key()).key(), last = view.node(view.count() - 1).key();
    return (range.low.empty() || kind.compare(range.low, first) <= 0) &&
           (range.high.empty() || kind.compare(last, range.high) < 0);
  }

  Result<void> check_children(Walk& walk, const PageView& view, std::size_t level, Range range) {
    ++walk.found.branch_pages;
    for (std::size_t i = 0; i < view.count(); ++i) {
      const Range below{i == 0 ? range.low : view.node(i).key(),
                        i + 1 == view.count() ? range.high : view.node(i + 1).key()};
      const auto good = check_page(walk, view.node(i).header.child(), level + 1, below);
      if (!good) return good;
    }
    return {};
  }

  Result<void> check_leaf(Walk& walk, const PageView& view) {
    ++walk.found.leaf_pages;
    walk.found.entries += view.count();
    for (std::size_t i = 0; i < view.count(); ++i) {
      const Node node = view.node(i);
      if (node.header.flags == lmdb::kSubData) {
        const Bytes key = node.key();
        named_.push_back({{reinterpret_cast<const char*>(key.data()), key.size()},
                          load<lmdb::Tree>(node.value())});
      }
      const bool is_big = node.header.flags == lmdb::kBigData;
      if (!is_big && !walk.kind.is_free_list) continue;
      std::vector<std::byte> run;
      if (is_big)
        if (const auto good = read_run(walk, node, run); !good) return good;
      if (!walk.kind.is_free_list) continue;
      const Bytes value = is_big ? Bytes(run).subspan(sizeof(lmdb::PageHeader))
                                 : Bytes(node.value(), node.header.value_bytes());
      const auto id = load<std::uint64_t>(node.key().data());
      if (const auto good = check_free_record(id, value.first(node.header.value_bytes())); !good)
        return good;
    }
    return {};
  }

  // A value too large for a page: pages in a row, behind one header.
  Result<void> read_run(Walk& walk, const Node& node, std::vector<std::byte>& run) {
    const auto page = load<std::uint64_t>(node.value());
    const std::uint64_t bytes = sizeof(lmdb::PageHeader) + node.header.value_bytes();
    const std::uint64_t count = (bytes + lmdb::kPageBytes - 1) / lmdb::kPageBytes;
    if (const auto mine = claim(page, count, walk.kind.name); !mine) return mine;
    walk.found.overflow_pages += count;
    run.resize(count * lmdb::kPageBytes);
    if (const auto got = read(page, run); !got) return got;
    const auto header = load<lmdb::PageHeader>(run.data());
    if (header.number != page || header.flags != lmdb::kOverflow || header.run_pages() != count)
      return damaged(page, "(" + walk.kind.name + ") is not the start of a long value");
    return {};
  }

  // How many, then that many page numbers, the highest first. Room may be left behind them.
  Result<void> check_free_record(std::uint64_t transaction, Bytes value) {
    const std::string where = "the free list of transaction " + std::to_string(transaction);
    if (transaction < 1 || transaction > meta_.transaction)
      return damaged(where + " is not of a transaction that has been");
    constexpr std::size_t kNumberBytes = sizeof(std::uint64_t);
    if (value.size() < kNumberBytes || value.size() % kNumberBytes != 0)
      return damaged(where + " has an impossible size");
    const auto number = [&](std::uint64_t i) {
      return load<std::uint64_t>(value.data() + i * kNumberBytes);
    };
    const std::uint64_t count = number(0);
    if (count >= value.size() / kNumberBytes) return damaged(where + " is cut short");
    for (std::uint64_t i = 1; i <= count; ++i) {
      if (i > 1 && number(i) >= number(i - 1)) return damaged(where + " is out of order");
      if (const auto mine = claim(number(i), 1, "free list"); !mine) return mine;
    }
    return {};
  }

  int fd_;
  std::uint64_t file_pages_ = 0;
  lmdb::Meta meta_;
  std::vector<bool> seen_;   // pages of the file that have a place
  std::vector<Page> pages_;  // one for each level of the tree being walked
  std::vector<std::pair<std::string, lmdb::Tree>> named_;
};

}  // namespace

Result<void> check_index(int fd) { return IndexCheck(fd).run(); }

}  // namespace kvpool
