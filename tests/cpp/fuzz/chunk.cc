// A coded chunk that a producer may have made up: it is refused, or decoded into the plan's rows
// and nowhere else.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "check.h"
#include "kvxfer/panel_plan.h"

namespace {

constexpr uint32_t kBlocks = 6, kBlockSize = 8, kHeads = 2, kContent = 16;
constexpr std::byte kUntouched{0xee};

struct Target {
  explicit Target(uint8_t choice)
      : memory(size_t{2} * kBlocks * kBlockSize * kHeads * kContent * 2) {
    std::fill(memory.begin(), memory.end(), kUntouched);
    layout.num_blocks = kBlocks;
    layout.block_size = kBlockSize;
    layout.num_heads = kHeads;
    layout.layers = {"a"};
    layout.planes = {{"k", kContent}, {"v", kContent}};
    const int64_t row = kContent * 2, block = row * kHeads * kBlockSize;
    for (int plane = 0; plane < 2; ++plane) {
      layout.views.push_back(
          {memory.data() + plane * block * kBlocks, block, row * kBlockSize, row, 2});
    }
    using kvxfer::Scheme;
    const Scheme schemes[][2] = {{Scheme::kInt8Channel, Scheme::kInt8},
                                 {Scheme::kFloat8E4M3, Scheme::kFloat8E4M3},
                                 {Scheme::kFloat8E5M2, Scheme::kFloat8E5M2},
                                 {Scheme::kRaw, Scheme::kRaw}};
    const auto& chosen = schemes[choice % 4];
    format.panel_tokens = 8;
    format.raw_until = choice & 4 ? 3 : 0;
    format.encodings = {{chosen[0], kvxfer::ScaleFormat::kBFloat16, 0},
                        {chosen[1], kvxfer::ScaleFormat::kBFloat16, 0}};
    table.blocks = {4, 1, 3};
    plan = std::make_unique<kvxfer::PanelPlan>(layout, table,
                                               kvxfer::Slice{{0}, 0, kHeads, 0, kTokens},
                                               std::vector<uint32_t>{0, 1}, format);
  }

  bool outside_untouched() const {
    for (const uint32_t block : {0u, 2u, 5u}) {
      for (int plane = 0; plane < 2; ++plane) {
        const std::byte* begin =
            layout.views[plane].data + block * layout.views[plane].block_stride;
        for (int64_t i = 0; i < layout.views[plane].block_stride; ++i) {
          if (begin[i] != kUntouched) return false;
        }
      }
    }
    return true;
  }

  static constexpr uint32_t kTokens = 20;
  std::vector<std::byte> memory;
  kvxfer::CacheLayout layout;
  kvxfer::BlockTable table;
  kvxfer::PanelFormat format;
  std::unique_ptr<kvxfer::PanelPlan> plan;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Target targets[8] = {Target(0), Target(1), Target(2), Target(3),
                              Target(4), Target(5), Target(6), Target(7)};
  if (size < 1) return 0;
  Target& target = targets[data[0] & 7];
  const uint32_t panels = target.plan->num_panels();
  // A copy of just its size, so that a read beyond its end is found.
  std::vector<std::byte> wire(size - 1);
  if (size > 1) std::memcpy(wire.data(), data + 1, size - 1);
  if (wire.size() > target.plan->most_bytes(0, panels)) return 0;
  refused_or([&] {
    kvxfer::unpack_panels(*target.plan, 0, panels, wire.data(), wire.size(), /*seed=*/1);
  });
  check(target.outside_untouched(), "wrote outside of the plan's blocks");
  return 0;
}

// The mutator keeps headers intact most of the time: without one nothing behind it is reached.
extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned int seed) {
  static const auto* chunks = [] {
    auto* made = new std::vector<std::vector<uint8_t>>;
    for (uint8_t choice = 0; choice < 8; ++choice) {
      Target source(choice);
      for (size_t i = 0; i < source.memory.size(); ++i) {
        source.memory[i] = std::byte(i % 2 ? 0x3f + i % 3 : i * 37);
      }
      const uint32_t panels = source.plan->num_panels();
      std::vector<uint8_t> chunk(1 + source.plan->most_bytes(0, panels));
      chunk[0] = choice;
      const auto packed = kvxfer::pack_panels(*source.plan, 0, panels,
                                              reinterpret_cast<std::byte*>(chunk.data() + 1), 1);
      chunk.resize(1 + packed.bytes);
      made->push_back(std::move(chunk));
    }
    return made;
  }();
  const auto& honest = (*chunks)[seed % 8];
  if (seed % 3 != 0 || honest.size() > max_size) return LLVMFuzzerMutate(data, size, max_size);
  std::memcpy(data, honest.data(), honest.size());
  // From the header's counts on, or anywhere.
  const size_t from = seed % 5 ? 1 + 24 + seed % 40 : 1;
  return from + LLVMFuzzerMutate(data + from, honest.size() - from, max_size - from);
}
