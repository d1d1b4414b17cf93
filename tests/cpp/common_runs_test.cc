#include "layout/common_runs.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "kvxfer/pack.h"

namespace kvxfer {
namespace {

// A cache of its own memory with the axes of a block in some order, and unused bytes between.
struct Side {
  std::vector<std::byte> memory;
  CacheLayout layout;

  Side(std::mt19937& random, uint32_t block_size, uint32_t blocks) : memory(1u << 16) {
    layout.block_size = block_size;
    layout.num_blocks = blocks;
    layout.num_heads = 2;
    layout.layers = {"a", "b"};
    layout.planes = {{"k", 8}, {"v", 8}};
    layout.element = ElementType::kFloat16;
    const bool heads_inside = random() % 2;
    const int64_t row = 16 + (random() % 2) * 16;
    const int64_t head = heads_inside ? row : row * block_size;
    const int64_t token = heads_inside ? 2 * row : row;
    const int64_t block = 2 * row * block_size;
    for (size_t view = 0; view < 4; ++view) {
      layout.views.push_back(
          {memory.data() + view * blocks * static_cast<size_t>(block), block, head, token, 2});
    }
  }
};

TEST_CASE("pieces that two caches have in common move what packing and unpacking move") {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    Side from(random, 1u << random() % 4, 16), to(random, 1u << random() % 4, 16);
    for (std::byte& byte : from.memory) byte = static_cast<std::byte>(random());
    const auto tokens = 1 + static_cast<uint32_t>(random() % (8 * std::min(from.layout.block_size,
                                                                           to.layout.block_size)));
    std::vector<uint32_t> blocks(16);
    for (uint32_t i = 0; i < 16; ++i) blocks[i] = i;
    std::shuffle(blocks.begin(), blocks.end(), random);
    const BlockTable table{blocks, 0, 0};
    std::shuffle(blocks.begin(), blocks.end(), random);
    const BlockTable other{blocks, 0, 0};
    const Slice slice{{0, 1}, 0, 2, 0, tokens};
    const auto tiles = tile_ends(0, tokens, from.layout.block_size, 0, to.layout.block_size, 0);
    const WireOrder order = choose_wire_order(from.layout, to.layout, false);
    const CopyPlan source(from.layout, table, slice, tiles, order, {0, 1});
    const CopyPlan target(to.layout, other, slice, tiles, order, {0, 1});

    const uint64_t begin = source.row_floor(random() % source.wire_bytes());
    const uint64_t end = source.wire_bytes();
    std::vector<std::byte> wire(end - begin);
    const Digest packed = pack(source, begin, end, wire.data(), 7);
    CHECK(digest_in_place(source, begin, end, 7) == packed);
    const std::vector<std::byte> before = to.memory;
    unpack(target, begin, end, wire.data(), 7);
    const std::vector<std::byte> expected = to.memory;
    std::memcpy(to.memory.data(), before.data(), before.size());
    CommonRuns runs(source, target, begin, end);
    CommonRuns::Piece piece;
    uint64_t bytes = 0;
    while (runs.next(piece)) {
      std::memcpy(piece.to, piece.from, piece.bytes);
      bytes += piece.bytes;
    }
    CHECK(bytes == end - begin);
    CHECK(to.memory == expected);
    CHECK(digest_in_place(target, begin, end, 7) == packed);
  }
}

TEST_CASE("a digest in place notices a changed bit") {
  std::mt19937 random(2);
  Side side(random, 4, 16);
  std::vector<uint32_t> blocks{3, 1, 7};
  const Slice slice{{0, 1}, 0, 2, 0, 12};
  const auto tiles = tile_ends(0, 12, 4, 0, 4, 0);
  const WireOrder order = choose_wire_order(side.layout, side.layout, false);
  const CopyPlan plan(side.layout, {blocks, 0, 0}, slice, tiles, order, {0, 1});
  const Digest before = digest_in_place(plan, 0, plan.wire_bytes(), 1);
  std::vector<Run> runs;
  plan.append_runs(0, plan.wire_bytes(), runs);
  for (const Run& run : runs) {
    run.address[run.bytes - 1] ^= std::byte{1};
    CHECK(digest_in_place(plan, 0, plan.wire_bytes(), 1) != before);
    run.address[run.bytes - 1] ^= std::byte{1};
  }
  CHECK(digest_in_place(plan, 0, plan.wire_bytes(), 1) == before);
}

TEST_CASE("extents are what views reach, and touching ones are one") {
  std::mt19937 random(3);
  Side side(random, 4, 16);
  CHECK(extents(side.layout).size() <= 4);
  uint64_t bytes = 0;
  for (const auto& extent : extents(side.layout)) {
    CHECK(extent.data() >= side.memory.data());
    CHECK(extent.data() + extent.size() <= side.memory.data() + side.memory.size());
    bytes += extent.size();
  }
  CHECK(bytes > 0);
  std::vector<std::byte> memory(4096);
  CacheLayout layout = side.layout;
  layout.num_blocks = 2;
  layout.block_size = 2;
  layout.num_heads = 1;
  layout.layers = {"a"};
  layout.views = {{memory.data() + 1000, 32, 32, 16, 2}, {memory.data() + 1064, 32, 32, 16, 2}};
  REQUIRE(extents(layout).size() == 1);  // they touch
  CHECK(extents(layout)[0].data() == memory.data() + 1000);
  CHECK(extents(layout)[0].size() == 128);
  REQUIRE(extents(layout, {memory.data() + 1064}).size() == 2);  // but an allocation ends between
  CHECK(extents(layout, {memory.data() + 1064})[1].data() == memory.data() + 1064);
  CHECK(extents(layout, {memory.data() + 1000, memory.data() + 1063}).size() == 1);
  layout.views[1].data = memory.data();
  REQUIRE(extents(layout).size() == 2);
  CHECK(extents(layout)[0].data() == memory.data());
}

}  // namespace
}  // namespace kvxfer
