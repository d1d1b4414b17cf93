#include <doctest/doctest.h>

#include <memory>
#include <vector>

#include "kvxfer/copy_plan.h"
#include "kvxfer/layout.h"
#include "kvxfer/status.h"

namespace kvxfer {
namespace {

constexpr uint32_t kBlocks = 6, kTokens = 4, kHeads = 3, kContent = 32;
constexpr int64_t kRow = kContent * 2;

// [block][kv head][token][content] bfloat16 planes behind each other, at addresses never touched.
CacheLayout head_major(uint32_t layers) {
  CacheLayout layout;
  layout.num_blocks = kBlocks;
  layout.block_size = kTokens;
  layout.num_heads = kHeads;
  layout.planes = {{"k", kContent}, {"v", kContent}};
  uintptr_t address = 1u << 20;
  for (uint32_t layer = 0; layer < layers; ++layer) {
    layout.layers.push_back("layer." + std::to_string(layer));
    for (size_t plane = 0; plane < 2; ++plane) {
      layout.views.push_back({reinterpret_cast<std::byte*>(address), kHeads * kTokens * kRow,
                              kTokens * kRow, kRow, 2});
      address += kBlocks * kHeads * kTokens * kRow;
    }
  }
  return layout;
}

TEST_CASE("layout: names of element types go both ways") {
  for (int i = 0; i < 8; ++i) {
    const auto type = static_cast<ElementType>(i);
    CHECK(element_from_name(element_name(type)) == type);
    CHECK(element_bytes(type) >= 1);
  }
  CHECK_THROWS_AS(element_bytes(static_cast<ElementType>(8)), Error);
  CHECK_THROWS_AS(element_from_name("int4"), Error);
}

TEST_CASE("layout: validate") {
  CacheLayout layout = head_major(2);
  layout.validate();
  CHECK(layout.token_bytes() == 2 * 2 * kHeads * kRow);
  layout.views[3].data = layout.views[0].data;
  CHECK_THROWS_WITH_AS(layout.validate(),
                       "layer \"layer.0\", plane \"k\" and layer \"layer.1\", plane \"v\" share "
                       "memory; every layer and plane needs memory of its own",
                       Error);
}

TEST_CASE("copy plan: outlives what it was made from, and copies") {
  auto layout = std::make_unique<CacheLayout>(head_major(2));
  auto table = std::make_unique<BlockTable>(BlockTable{{4, 1}, 0, 0});
  const WireOrder order = {Axis::kLayer, Axis::kPlane, Axis::kTile, Axis::kHead, Axis::kToken};
  const CopyPlan plan(*layout, *table, {{1, 0}, 0, kHeads, 0, 6}, {4, 6}, order, {1});
  std::byte* const first = layout->view(1, 1).data + 4 * layout->view(1, 1).block_stride;
  layout.reset();
  table.reset();
  const CopyPlan copy = plan;
  std::vector<Run> runs;
  copy.append_runs(0, copy.wire_bytes(), runs);
  REQUIRE(runs.size() == 4);
  CHECK(runs[0].address == first);
  CHECK(runs[0].bytes == kHeads * kTokens * kRow);
  CHECK(runs[0].count == 1);
  CHECK(runs[1].bytes == 2 * kRow);
  CHECK(runs[1].count == kHeads);
  CHECK(runs[1].stride == kTokens * kRow);

  // Appending continues nothing that was there before.
  copy.append_runs(0, kRow, runs);
  REQUIRE(runs.size() == 5);
  CHECK(runs[4].address == first);
  CHECK(runs[4].bytes == kRow);

  runs.clear();
  copy.append_tail_runs(runs);
  REQUIRE(runs.size() == 2);
  CHECK(runs[0].bytes == 2 * kRow);
  CHECK(runs[0].count == kHeads);
}

TEST_CASE("copy plan: many scattered runs cost no more each than few") {
  // By counting, not by time: each run is one block, however many there are.
  CacheLayout layout = head_major(1);
  layout.num_blocks = 1u << 16;
  layout.planes.resize(1);
  layout.views.resize(1);
  std::vector<uint32_t> blocks;
  for (uint32_t i = 0; i < 32768; ++i) blocks.push_back((i * 40503u) % layout.num_blocks);
  const auto tokens = static_cast<uint32_t>(blocks.size()) * kTokens;
  const WireOrder order = {Axis::kLayer, Axis::kPlane, Axis::kTile, Axis::kHead, Axis::kToken};
  const CopyPlan plan(layout, {blocks, 0, 0}, {{0}, 0, kHeads, 0, tokens},
                      tile_ends(0, tokens, kTokens, 0, kTokens, 0), order, {0});
  std::vector<Run> runs;
  plan.append_runs(0, plan.wire_bytes(), runs);
  CHECK(runs.size() == blocks.size());
  runs.clear();
  const uint64_t middle = plan.row_floor(plan.wire_bytes() / 2 + 1);
  plan.append_runs(middle, middle + 10 * kRow, runs);
  CHECK(runs.size() == 1);
}

TEST_CASE("wire order: a null base address and other processes' addresses do no harm") {
  CacheLayout producer = head_major(2);
  for (PlaneView& view : producer.views) view.data -= 1u << 20;
  const CacheLayout consumer = head_major(2);
  const WireOrder order = choose_wire_order(producer, consumer, true);
  CHECK(order[0] == Axis::kLayer);
  CHECK(order[4] == Axis::kToken);
}

}  // namespace
}  // namespace kvxfer
