// Blocks and pages hold the same items, whatever the engine's shapes and strides; nothing else
// moves.
//
// The reference below copies item by item from the meaning of the dimensions. It shares no code
// with the plan.
#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "block/layout.h"
#include "block_random.h"

namespace kvpool {
namespace {

using test::Random;
using Memory = std::vector<std::byte>;
using Pages = std::vector<std::int64_t>;

#if defined(__SANITIZE_THREAD__)
constexpr int kRounds = 60;  // there is one thread here, and the reference is slow under TSan
#else
constexpr int kRounds = 400;
#endif

// One engine: its tensors and the memory that each of them owns, to the byte.
struct Engine {
  PagedLayers layers;
  std::vector<Memory> memory;
  std::uint64_t page_count = 0;

  Engine() = default;
  Engine(Engine&&) = default;
  std::uint64_t pages_per_block() const { return layers.block_tokens / layers.page_tokens; }
};

// Calls visit(tensor number, offset in its memory, offset in the block) for every item of a block.
using Visit = std::function<void(std::size_t, std::size_t, std::size_t)>;

std::size_t offset_in_tensor(const PagedTensor& tensor, const std::vector<std::uint64_t>& index) {
  std::int64_t offset = 0;
  for (std::size_t i = 0; i < index.size(); ++i) {
    if (tensor.dimensions[i].size > 1) {
      offset += static_cast<std::int64_t>(index[i]) * tensor.dimensions[i].stride_bytes;
    }
  }
  return static_cast<std::size_t>(offset);
}

// The positions in the list of dimensions, in the order in which their indices change in the block,
// slowest first. Tokens of the block are (page, token of the page), so page comes before token.
std::vector<std::size_t> block_order(const PagedTensor& tensor, LayoutKind kind) {
  std::vector<Role> roles;
  if (kind == LayoutKind::nhd) roles = {Role::kv, Role::page, Role::token, Role::head};
  if (kind == LayoutKind::hnd) roles = {Role::kv, Role::head, Role::page, Role::token};
  if (kind == LayoutKind::mla) roles = {Role::page, Role::token};
  if (kind == LayoutKind::opaque) roles = {Role::page};
  std::vector<std::size_t> order;
  for (const Role wanted : roles) {
    for (std::size_t i = 0; i < tensor.dimensions.size(); ++i) {
      if (tensor.dimensions[i].role == wanted) order.push_back(i);
    }
  }
  for (std::size_t i = 0; i < tensor.dimensions.size(); ++i) {
    if (std::ranges::find(order, i) == order.end()) order.push_back(i);
  }
  return order;
}

void visit_items(const Engine& engine, const Pages& pages, const Visit& visit) {
  std::size_t in_block = 0;
  for (std::size_t t = 0; t < engine.layers.tensors.size(); ++t) {
    const PagedTensor& tensor = engine.layers.tensors[t];
    const auto order = block_order(tensor, engine.layers.kind);
    std::vector<std::uint64_t> index(tensor.dimensions.size());
    std::function<void(std::size_t)> descend = [&](std::size_t depth) {
      if (depth == order.size()) {
        visit(t, offset_in_tensor(tensor, index), in_block);
        in_block += tensor.item_bytes;
        return;
      }
      const std::size_t dim = order[depth];
      if (tensor.dimensions[dim].role == Role::page) {
        for (const std::int64_t page : pages) {
          index[dim] = static_cast<std::uint64_t>(page);
          descend(depth + 1);
        }
      } else {
        for (index[dim] = 0; index[dim] < tensor.dimensions[dim].size; ++index[dim]) {
          descend(depth + 1);
        }
      }
    };
    descend(0);
  }
}

Memory reference_gather(const Engine& engine, const Pages& pages) {
  Memory block;
  visit_items(engine, pages, [&](std::size_t t, std::size_t at, std::size_t) {
    for (std::size_t b = 0; b < engine.layers.tensors[t].item_bytes; ++b) {
      block.push_back(engine.memory[t][at + b]);
    }
  });
  return block;
}

std::vector<Memory> reference_scatter(const Engine& engine, const Pages& pages,
                                      const Memory& block) {
  std::vector<Memory> after = engine.memory;
  visit_items(engine, pages, [&](std::size_t t, std::size_t at, std::size_t in_block) {
    for (std::size_t b = 0; b < engine.layers.tensors[t].item_bytes; ++b) {
      after[t][at + b] = block[in_block + b];
    }
  });
  return after;
}

// Lays the dimensions out in a random order of strides, with gaps here and there.
void lay_out(Random& random, PagedTensor& tensor, Memory& memory) {
  std::vector<std::size_t> order(tensor.dimensions.size());
  std::iota(order.begin(), order.end(), 0);
  if (random.coin()) std::ranges::shuffle(order, random.engine());
  std::uint64_t covered = tensor.item_bytes;
  for (auto i = order.rbegin(); i != order.rend(); ++i) {
    Dimension& dim = tensor.dimensions[*i];
    const std::uint64_t gap = random.between(0, 3) == 0 ? random.between<std::uint64_t>(1, 70) : 0;
    const std::uint64_t stride = covered + gap;
    // A dimension of one may carry any stride: engines leave zeros and worse there.
    dim.stride_bytes = dim.size > 1 ? static_cast<std::int64_t>(stride)
                                    : random.between<std::int64_t>(-1000, 1000);
    covered += (dim.size - 1) * stride;
  }
  memory.resize(covered);
  for (auto& byte : memory) byte = static_cast<std::byte>(random.between(0, 255));
  tensor.base = memory.data();
  tensor.extent_bytes = covered;
}

std::vector<Dimension> random_dimensions(Random& random, const Engine& engine, bool wide) {
  const auto some = [&](std::uint64_t most) { return random.between<std::uint64_t>(1, most); };
  std::vector<Dimension> dims = {{Role::page, engine.page_count, 0}};
  const LayoutKind kind = engine.layers.kind;
  if (kind == LayoutKind::opaque) {
    constexpr std::array<Role, 4> kAny = {Role::element, Role::token, Role::head, Role::kv};
    for (auto count = random.between(0, 4); count > 0; --count) {
      dims.push_back({kAny[random.between<std::size_t>(0, 3)], some(wide ? 40 : 6), 0});
    }
  } else {
    dims.push_back({Role::token, engine.layers.page_tokens, 0});
    if (kind != LayoutKind::mla) dims.push_back({Role::head, some(wide ? 2 : 5), 0});
    const bool has_kv = kind != LayoutKind::mla && !engine.layers.split_kv && random.coin();
    if (has_kv) dims.push_back({Role::kv, some(2), 0});
    dims.push_back({Role::element, some(wide ? 900 : 40), 0});
    if (!has_kv && !wide && random.coin()) dims.push_back({Role::element, some(4), 0});
  }
  std::ranges::shuffle(dims, random.engine());
  return dims;
}

Engine random_engine(Random& random) {
  Engine engine;
  constexpr std::array<LayoutKind, 4> kKinds = {LayoutKind::nhd, LayoutKind::hnd, LayoutKind::mla,
                                                LayoutKind::opaque};
  constexpr std::array<std::uint64_t, 5> kItems = {1, 2, 4, 8, 3};
  PagedLayers& layers = engine.layers;
  layers.kind = kKinds[random.between<std::size_t>(0, 3)];
  const bool has_kv = layers.kind == LayoutKind::nhd || layers.kind == LayoutKind::hnd;
  layers.split_kv = has_kv && random.coin();
  layers.page_tokens = random.between<std::uint64_t>(1, 6);
  layers.block_tokens = layers.page_tokens * random.between<std::uint64_t>(1, 4);
  engine.page_count = random.between<std::uint64_t>(1, 8);
  const bool wide = random.between(0, 15) == 0;  // runs longer than a bounce buffer
  const auto tensors = random.between<std::size_t>(1, 3) * (layers.split_kv ? 2 : 1);
  engine.memory.resize(tensors);
  for (auto& memory : engine.memory) {
    PagedTensor tensor;
    tensor.item_bytes = kItems[random.between<std::size_t>(0, kItems.size() - 1)];
    tensor.dimensions = random_dimensions(random, engine, wide);
    lay_out(random, tensor, memory);
    layers.tensors.push_back(tensor);
  }
  return engine;
}

// A block table of one block; distinct pages where there are enough, as in an engine.
Pages random_pages(Random& random, const Engine& engine) {
  Pages all(std::max(engine.page_count, engine.pages_per_block()));
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i] = static_cast<std::int64_t>(i % engine.page_count);
  }
  std::ranges::shuffle(all, random.engine());
  all.resize(engine.pages_per_block());
  return all;
}

std::string describe(const Engine& engine) {
  std::ostringstream text;
  text << "kind " << static_cast<int>(engine.layers.kind) << ", pages per block "
       << engine.pages_per_block();
  for (const auto& tensor : engine.layers.tensors) {
    text << "\n  item " << tensor.item_bytes;
    for (const auto& dim : tensor.dimensions) {
      text << ' ' << role_name(dim.role) << ':' << dim.size << '/' << dim.stride_bytes;
    }
  }
  return text.str();
}

TEST_CASE("layout: gather is the reference, and its checksum is that of the block") {
  Random random("layout gather");
  for (int round = 0; round < kRounds; ++round) {
    const Engine engine = random_engine(random);
    CAPTURE(describe(engine));
    const auto plan = CopyPlan::make(engine.layers);
    REQUIRE_MESSAGE(plan.has_value(), plan.error().message);
    const Pages pages = random_pages(random, engine);
    const Memory expected = reference_gather(engine, pages);
    REQUIRE(plan->block_bytes() == expected.size());
    REQUIRE(plan->pages_per_block() == pages.size());
    REQUIRE(plan->page_count() == engine.page_count);

    Memory block(expected.size(), std::byte{0xa5});
    REQUIRE(gather(*plan, pages, block).has_value());
    REQUIRE(block == expected);

    for (const Stores stores : {Stores::cached, Stores::streaming}) {
      std::ranges::fill(block, std::byte{0xa5});
      const auto sum = gather_with_checksum(*plan, pages, block, stores);
      REQUIRE(sum.has_value());
      REQUIRE(block == expected);
      REQUIRE(*sum == checksum(expected.data(), expected.size()));
    }
  }
}

bool always(void*) { return true; }

TEST_CASE("layout: scatter is the reference, and leaves every other byte alone") {
  Random random("layout scatter");
  for (int round = 0; round < kRounds; ++round) {
    Engine engine = random_engine(random);
    const Pages pages = random_pages(random, engine);
    if (engine.page_count < pages.size()) continue;  // a page given twice has no one right content
    CAPTURE(describe(engine));
    const auto plan = CopyPlan::make(engine.layers);
    REQUIRE_MESSAGE(plan.has_value(), plan.error().message);
    Memory block(plan->block_bytes());
    for (auto& byte : block) byte = static_cast<std::byte>(random.between(0, 255));
    const auto expected = reference_scatter(engine, pages, block);

    if (random.coin()) {
      REQUIRE(scatter(*plan, pages, block).has_value());
    } else {
      const auto whole = scatter_while_valid(*plan, pages, block, {always, nullptr});
      REQUIRE(whole.has_value());
      REQUIRE(*whole);
    }
    REQUIRE(engine.memory == expected);

    Memory again(block.size());
    REQUIRE(gather(*plan, pages, again).has_value());
    REQUIRE(again == block);
  }
}

TEST_CASE("layout: one block moves between engines of other strides and page sizes") {
  Random random("layout engines");
  for (int round = 0; round < 100; ++round) {
    const std::uint64_t block_tokens = 12;
    const auto engine_of = [&](std::uint64_t page_tokens) {
      Engine engine;
      engine.layers.kind = LayoutKind::hnd;
      engine.layers.block_tokens = block_tokens;
      engine.layers.page_tokens = page_tokens;
      engine.page_count = 13;
      engine.memory.resize(2);
      for (auto& memory : engine.memory) {
        PagedTensor tensor;
        tensor.item_bytes = 2;
        tensor.dimensions = {{Role::kv, 2, 0},
                             {Role::page, engine.page_count, 0},
                             {Role::token, page_tokens, 0},
                             {Role::head, 3, 0},
                             {Role::element, 8, 0}};
        std::ranges::shuffle(tensor.dimensions, random.engine());
        lay_out(random, tensor, memory);
        engine.layers.tensors.push_back(tensor);
      }
      return engine;
    };
    const Engine from = engine_of(4);
    const Engine to = engine_of(3);
    const Pages from_pages = random_pages(random, from);
    const Pages to_pages = random_pages(random, to);
    const auto from_plan = CopyPlan::make(from.layers);
    const auto to_plan = CopyPlan::make(to.layers);
    REQUIRE(from_plan.has_value());
    REQUIRE(to_plan.has_value());
    REQUIRE(from_plan->block_bytes() == to_plan->block_bytes());

    Memory block(from_plan->block_bytes());
    REQUIRE(gather(*from_plan, from_pages, block).has_value());
    REQUIRE(scatter(*to_plan, to_pages, block).has_value());
    REQUIRE(reference_gather(to, to_pages) == block);
  }
}

// Two layers of 640 KiB each in one block of 1,280 KiB.
Engine large_engine() {
  Engine engine;
  engine.layers = {LayoutKind::opaque, 2, 1, false, {}};
  engine.page_count = 4;
  engine.memory.assign(2, Memory(4 * (320 << 10), std::byte{1}));
  for (auto& memory : engine.memory) {
    PagedTensor tensor{memory.data(), memory.size(), 1, {}};
    tensor.dimensions = {{Role::page, 4, 320 << 10}, {Role::element, 320 << 10, 1}};
    engine.layers.tensors.push_back(tensor);
  }
  return engine;
}

struct Asked {
  std::uint64_t times = 0;
  std::uint64_t stop_at = ~0ull;
  static bool ask(void* context) {
    auto* asked = static_cast<Asked*>(context);
    return ++asked->times < asked->stop_at;
  }
};

TEST_CASE("layout: a racing scatter asks every 256 KiB and at the end, and stops when told") {
  Engine engine = large_engine();
  const auto plan = CopyPlan::make(engine.layers);
  REQUIRE(plan.has_value());
  const Memory block(plan->block_bytes(), std::byte{7});
  REQUIRE(block.size() == 1280 << 10);
  const Pages pages = {3, 1};

  Asked asked;
  const auto whole = scatter_while_valid(*plan, pages, block, {Asked::ask, &asked});
  REQUIRE(whole.has_value());
  CHECK(*whole);
  CHECK(asked.times == 5);

  for (std::uint64_t stop_at = 1; stop_at <= 5; ++stop_at) {
    for (auto& memory : engine.memory) std::ranges::fill(memory, std::byte{1});
    Asked stopping{0, stop_at};
    const auto stopped = scatter_while_valid(*plan, pages, block, {Asked::ask, &stopping});
    REQUIRE(stopped.has_value());
    CHECK_FALSE(*stopped);
    CHECK(stopping.times == stop_at);
    std::size_t written = 0;
    for (const auto& memory : engine.memory) {
      written += static_cast<std::size_t>(std::ranges::count(memory, std::byte{7}));
    }
    CHECK(written == stop_at * kValidityBytes);
  }
}

TEST_CASE("layout: page numbers are checked before anything moves") {
  Engine engine = large_engine();
  const auto plan = CopyPlan::make(engine.layers);
  REQUIRE(plan.has_value());
  const auto before = engine.memory;
  Memory block(plan->block_bytes(), std::byte{7});
  const auto refusal = [&](const Pages& pages) {
    const auto scattered = scatter(*plan, pages, block);
    const auto gathered = gather(*plan, pages, block);
    REQUIRE_FALSE(scattered.has_value());
    REQUIRE_FALSE(gathered.has_value());
    CHECK(scattered.error().code == Code::bad_argument);
    CHECK(scattered.error().message == gathered.error().message);
    CHECK_FALSE(gather_with_checksum(*plan, pages, block, Stores::cached).has_value());
    CHECK_FALSE(scatter_while_valid(*plan, pages, block, {always, nullptr}).has_value());
    return scattered.error().message;
  };
  CHECK(refusal({0, 4}) == "page 1 of the table is 4; there are 4 pages");
  CHECK(refusal({-1, 0}) == "page 0 of the table is -1; there are 4 pages");
  CHECK(refusal({INT64_MIN, INT64_MAX}) ==
        "page 0 of the table is -9223372036854775808; there are 4 pages");
  CHECK(refusal({0}) == "1 pages for one block; it has 2");
  CHECK(refusal({0, 1, 2}) == "3 pages for one block; it has 2");
  CHECK(engine.memory == before);
  CHECK(std::ranges::all_of(block, [](std::byte byte) { return byte == std::byte{7}; }));

  CHECK(plan->check_pages(Pages{0, 1, 2, 3, 3, 3}).has_value());
  CHECK_FALSE(plan->check_pages(Pages{0, 1, 2, 3, 3, 9}).has_value());
}

// A sound tensor of 4 pages, 2 tokens, 3 heads, 8 items of 2 bytes; each case spoils one thing.
PagedLayers sound(Memory& memory) {
  memory.resize(4 * 2 * 3 * 8 * 2);
  PagedTensor tensor{memory.data(), memory.size(), 2, {}};
  tensor.dimensions = {
      {Role::page, 4, 96}, {Role::token, 2, 48}, {Role::head, 3, 16}, {Role::element, 8, 2}};
  return {LayoutKind::nhd, 4, 2, false, {tensor}};
}

std::string complaint(const std::function<void(PagedLayers&, PagedTensor&)>& spoil) {
  Memory memory;
  PagedLayers layers = sound(memory);
  spoil(layers, layers.tensors[0]);
  const auto plan = CopyPlan::make(layers);
  if (plan) return "";
  CHECK(plan.error().code == Code::bad_argument);
  return plan.error().message;
}

#define SPOIL(statement)                     \
  complaint([](auto& layers, auto& tensor) { \
    (void)layers;                            \
    (void)tensor;                            \
    statement;                               \
  })

TEST_CASE("layout: hostile strides and extents are refused") {
  constexpr std::int64_t kHuge = INT64_MAX;
  CHECK(SPOIL() == "");
  CHECK(SPOIL(tensor.dimensions[2].stride_bytes = 0) ==
        "tensor 0: dimension 2 (head) has a stride of 0 bytes; it must be positive");
  CHECK(SPOIL(tensor.dimensions[0].stride_bytes = -96) ==
        "tensor 0: dimension 0 (page) has a stride of -96 bytes; it must be positive");
  CHECK(SPOIL(tensor.dimensions[1].stride_bytes = 47) ==
        "tensor 0: the token dimension has a stride of 47 bytes and overlaps the 48 bytes within");
  CHECK(SPOIL(tensor.dimensions[1].stride_bytes = 16) != "");
  CHECK(SPOIL(tensor.item_bytes = 3) ==
        "tensor 0: the element dimension has a stride of 2 bytes and overlaps the 3 bytes within");
  CHECK(SPOIL(tensor.extent_bytes -= 1) == "tensor 0: reaches over 384 bytes; its memory has 383");
  CHECK(SPOIL(tensor.dimensions[0].stride_bytes = 97) ==
        "tensor 0: reaches over 387 bytes; its memory has 384");
  CHECK(SPOIL(tensor.dimensions[0].stride_bytes = kHuge) ==
        "tensor 0: the page dimension reaches beyond 2^64 bytes");
  CHECK(SPOIL(tensor.dimensions[0].size = 1ull << 62) ==
        "tensor 0: the page dimension reaches beyond 2^64 bytes");
  CHECK(SPOIL(tensor.extent_bytes = ~0ull) != "");
  CHECK(SPOIL(tensor.dimensions[3].size = 0) == "tensor 0: dimension 3 (element) is empty");
  CHECK(SPOIL(tensor.item_bytes = 0) == "tensor 0: has items of 0 bytes");
  CHECK(SPOIL(tensor.base = nullptr) == "tensor 0: has no memory");
}

TEST_CASE("layout: shapes that do not fit the kind are refused") {
  CHECK(SPOIL(layers.tensors.clear()) == "there are no tensors");
  CHECK(SPOIL(layers.page_tokens = 0) == "page_tokens is 0; it must be at least 1");
  CHECK(SPOIL(layers.block_tokens = 5) ==
        "block_tokens is 5; it must be a multiple of page_tokens, 2");
  CHECK(SPOIL(layers.block_tokens = 0) != "");
  CHECK(SPOIL(layers.block_tokens = 1ull << 62) ==
        "tensor 0: makes a block of more than 2^64 bytes");
  CHECK(SPOIL(layers.page_tokens = 4) == "tensor 0: has 2 tokens in a page; page_tokens is 4");
  CHECK(SPOIL(tensor.dimensions.erase(tensor.dimensions.begin())) ==
        "tensor 0: has 0 page dimensions; it must have 1");
  CHECK(SPOIL(tensor.dimensions[3].role = Role::page) ==
        "tensor 0: has 2 page dimensions; it must have 1");
  CHECK(SPOIL(tensor.dimensions[3].role = Role::head) == "tensor 0: has the dimension head twice");
  CHECK(SPOIL(tensor.dimensions.erase(tensor.dimensions.begin() + 1)) ==
        "tensor 0: has no token dimension");
  CHECK(SPOIL(tensor.dimensions.erase(tensor.dimensions.begin() + 2)) ==
        "tensor 0: has no head dimension");
  CHECK(SPOIL(tensor.dimensions.pop_back()) == "tensor 0: has no element dimension");
  CHECK(SPOIL(tensor.dimensions.resize(6)) == "tensor 0: has 6 dimensions; the limit is 5");
  CHECK(SPOIL(layers.kind = LayoutKind::mla) == "tensor 0: has 3 heads; mla allows 1");
  CHECK(SPOIL(tensor.dimensions[2].role = Role::kv; layers.kind = LayoutKind::mla) ==
        "tensor 0: has a kv dimension of 3; the limit is 1");
  CHECK(SPOIL(layers.split_kv = true) == "there are 1 tensors; K and V apart need an even number");
  CHECK(SPOIL(layers.split_kv = true; layers.kind = LayoutKind::opaque) ==
        "only nhd and hnd have K and V to split");
  CHECK(SPOIL(layers.tensors.push_back(tensor); layers.tensors[1].dimensions[0].size = 3) ==
        "tensor 1: has 3 pages; tensor 0 has 4");
}

TEST_CASE("layout: what is contiguous moves in one run") {
  Memory memory;
  PagedLayers layers = sound(memory);
  const auto packed = CopyPlan::make(layers);
  REQUIRE(packed.has_value());
  CHECK(packed->tensors()[0].strip.run_bytes == 96);  // a whole page
  CHECK(packed->tensors()[0].loop_count == 1);

  layers.kind = LayoutKind::hnd;  // heads first in the block, tokens first in the tensor
  const auto crossed = CopyPlan::make(layers);
  REQUIRE(crossed.has_value());
  CHECK(crossed->tensors()[0].strip.run_bytes == 16);
  CHECK(crossed->tensors()[0].strip.count == 2);

  layers.block_tokens = layers.page_tokens;  // one page per block parts nothing
  layers.kind = LayoutKind::nhd;
  layers.tensors[0].dimensions[0].size = 1;
  const auto single = CopyPlan::make(layers);
  REQUIRE(single.has_value());
  CHECK(single->tensors()[0].strip.run_bytes == 96);
}

TEST_CASE("layout: names of kinds and roles") {
  CHECK(layout_kind("hnd") == LayoutKind::hnd);
  CHECK_FALSE(layout_kind("HND").has_value());
  for (const Role each : {Role::page, Role::kv, Role::token, Role::head, Role::element}) {
    CHECK(role(role_name(each)) == each);
  }
  CHECK_FALSE(role("").has_value());
}

}  // namespace
}  // namespace kvpool
