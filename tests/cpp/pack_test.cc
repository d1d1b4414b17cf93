#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "kvxfer/pack.h"
#include "kvxfer/status.h"

namespace kvxfer {
namespace {

constexpr uint32_t kBlocks = 9, kTokens = 8, kHeads = 4;

// One layer with one plane, in memory that ends where the last element ends.
struct Side {
  std::vector<std::byte> memory;
  CacheLayout layout;
  BlockTable table;

  Side(bool token_major, uint32_t content, uint32_t seed) {
    const int64_t row = content * 2;
    memory.resize(kBlocks * kTokens * kHeads * static_cast<size_t>(row));
    std::mt19937 random(seed);
    for (std::byte& byte : memory) byte = static_cast<std::byte>(random());
    layout.num_blocks = kBlocks;
    layout.block_size = kTokens;
    layout.num_heads = kHeads;
    layout.layers = {"a"};
    layout.planes = {{"k", content}};
    const int64_t head = token_major ? row : kTokens * row;
    const int64_t token = token_major ? kHeads * row : row;
    layout.views = {{memory.data(), kTokens * kHeads * row, head, token, 2}};
    table.blocks.resize(kBlocks);
    std::iota(table.blocks.begin(), table.blocks.end(), 0u);
    std::shuffle(table.blocks.begin(), table.blocks.end(), random);
  }

  const std::byte* row(uint32_t token, uint32_t head) const {
    const PlaneView& view = layout.views[0];
    return view.data + table.blocks[token / kTokens] * view.block_stride + head * view.head_stride +
           token % kTokens * view.token_stride;
  }

  CopyPlan plan(uint32_t begin, uint32_t end) const {
    const WireOrder order = {Axis::kLayer, Axis::kPlane, Axis::kTile, Axis::kHead, Axis::kToken};
    const uint32_t slot = begin % kTokens;
    return CopyPlan(layout, table, {{0}, 0, kHeads, begin, end},
                    tile_ends(begin, end, kTokens, slot, kTokens, slot), order, {0});
  }
};

TEST_CASE("pack: from token-major to head-major in every variant and size of row") {
  const std::string before = simd_variant();
  for (const std::string& variant : simd_variants()) {
    set_simd_variant(variant);
    for (const uint32_t content : {1u, 16u, 20u, 32u, 96u}) {
      CAPTURE(variant);
      CAPTURE(content);
      const Side producer(true, content, 1);
      Side consumer(false, content, 2);
      const uint32_t begin = 3, end = 67;
      const CopyPlan from = producer.plan(begin, end);
      const CopyPlan to = consumer.plan(begin, end);
      uint64_t at = 0;
      for (uint64_t step = 1; at < from.wire_bytes(); step += 700) {
        uint64_t next = from.row_floor(at + step + content * 2);
        std::vector<std::byte> wire(next - at);
        const Digest packed = pack(from, at, next, wire.data(), step);
        CHECK(packed == digest(wire, step));
        CHECK(unpack(to, at, next, wire.data(), step) == packed);
        at = next;
      }
      zero_tail(to);
      size_t wrong = 0;
      for (uint32_t head = 0; head < kHeads; ++head) {
        for (uint32_t token = begin; token < end; ++token) {
          wrong +=
              std::memcmp(producer.row(token, head), consumer.row(token, head), content * 2) != 0;
        }
        for (uint32_t token = end; token % kTokens != 0; ++token) {
          const std::vector<std::byte> zeros(content * 2);
          wrong += std::memcmp(consumer.row(token, head), zeros.data(), zeros.size()) != 0;
        }
      }
      CHECK(wrong == 0);
    }
  }
  set_simd_variant(before);
}

TEST_CASE("pack: several threads share a plan") {
  const Side producer(true, 64, 1);
  Side consumer(false, 64, 2);
  const uint32_t end = kBlocks * kTokens;
  const CopyPlan from = producer.plan(0, end);
  const CopyPlan to = consumer.plan(0, end);
  std::vector<std::thread> threads;
  constexpr uint64_t kThreads = 4;
  for (uint64_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      const uint64_t begin = from.row_floor(from.wire_bytes() * i / kThreads);
      const uint64_t stop = from.row_floor(from.wire_bytes() * (i + 1) / kThreads);
      std::vector<std::byte> wire(stop - begin);
      pack(from, begin, stop, wire.data(), i);
      unpack(to, begin, stop, wire.data(), i);
    });
  }
  for (std::thread& thread : threads) thread.join();
  size_t wrong = 0;
  for (uint32_t head = 0; head < kHeads; ++head) {
    for (uint32_t token = 0; token < end; ++token) {
      wrong += std::memcmp(producer.row(token, head), consumer.row(token, head), 128) != 0;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("pack: a range off the row boundaries is refused before anything is written") {
  const Side producer(true, 16, 1);
  const CopyPlan plan = producer.plan(0, 8);
  std::byte untouched{0x5a};
  CHECK_THROWS_AS(pack(plan, 1, 32, &untouched, 0), Error);
  CHECK_THROWS_AS(pack(plan, 0, plan.wire_bytes() + 32, &untouched, 0), Error);
  CHECK(untouched == std::byte{0x5a});
}

}  // namespace
}  // namespace kvxfer
