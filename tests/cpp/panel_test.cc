#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "kvxfer/panel_plan.h"
#include "kvxfer/status.h"
#include "simd_variant.h"

namespace kvxfer {
namespace {

constexpr uint32_t kHeads = 3, kLayers = 2, kPlanes = 2, kSlots = 72;
constexpr uint32_t kBegin = 3, kEnd = 70;
constexpr std::byte kGuard{0xa5};

// Two layers of two planes, in memory that ends where the last element ends.
struct Side {
  std::vector<std::byte> memory;
  CacheLayout layout;
  BlockTable table;

  Side(ElementType element, uint32_t block_size, uint32_t content, int64_t spread = 1) {
    const auto bytes = static_cast<int64_t>(element_bytes(element));
    const int64_t row = content * bytes * spread;
    const uint32_t blocks = kSlots / block_size;
    const int64_t plane = row * kHeads * kSlots;
    memory.assign(static_cast<size_t>(plane * kPlanes * kLayers), kGuard);
    layout.element = element;
    layout.num_blocks = blocks;
    layout.block_size = block_size;
    layout.num_heads = kHeads;
    layout.layers = {"a", "b"};
    layout.planes = {{"k", content}, {"v", content}};
    for (uint32_t i = 0; i < kLayers * kPlanes; ++i) {
      layout.views.push_back({memory.data() + i * plane, block_size * kHeads * row, row,
                              kHeads * row, bytes * spread});
    }
    table.blocks.resize(blocks);
    std::iota(table.blocks.begin(), table.blocks.end(), 0u);
    std::shuffle(table.blocks.begin(), table.blocks.end(), std::mt19937(block_size));
  }

  std::byte* element(uint32_t view, uint32_t head, uint32_t token, uint32_t column) {
    const PlaneView& v = layout.views[view];
    return v.data + table.blocks[token / layout.block_size] * v.block_stride +
           head * v.head_stride + token % layout.block_size * v.token_stride +
           column * v.content_stride;
  }

  void fill_bytes(uint32_t seed) {
    std::mt19937 random(seed);
    for (std::byte& byte : memory) byte = static_cast<std::byte>(random());
  }

  PanelPlan plan(const PanelFormat& format) const {
    return PanelPlan(layout, table, {{1, 0}, 0, kHeads, kBegin, kEnd}, {1, 0}, format);
  }
};

PanelFormat format_of(const Side& producer, Encoding encoding, uint32_t panel_tokens = 16) {
  PanelFormat format;
  format.encodings = {encoding, encoding};
  format.panel_tokens = panel_tokens;
  format.producer_element = producer.layout.element;
  for (const uint32_t layer : {1u, 0u}) {
    for (const uint32_t plane : {1u, 0u}) {
      format.producer_scales.push_back(producer.layout.scale(layer, plane));
    }
  }
  return format;
}

std::vector<std::byte> packed(const PanelPlan& plan, uint32_t begin, uint32_t end, uint64_t seed) {
  std::vector<std::byte> wire(plan.most_bytes(begin, end));
  const CodedChunk chunk = pack_panels(plan, begin, end, wire.data(), seed);
  REQUIRE(chunk.bytes <= wire.size());
  wire.resize(chunk.bytes);
  wire.shrink_to_fit();
  CHECK(chunk.digest == digest(wire, seed));
  // Past the caches, at an odd address, it is the same.
  for (const bool with_digest : {true, false}) {
    std::vector<std::byte> streamed(plan.most_bytes(begin, end) + 1, kGuard);
    const CodedChunk same =
        pack_panels(plan, begin, end, streamed.data() + 1, seed, with_digest, /*stream=*/true);
    CHECK(same.bytes == chunk.bytes);
    CHECK(same.exceptions == chunk.exceptions);
    CHECK(same.digest == (with_digest ? chunk.digest : Digest{}));
    CHECK(std::equal(wire.begin(), wire.end(), streamed.begin() + 1));
  }
  return wire;
}

// Elements of the slice that differ from what a Conversion makes of the producer's, and elements
// outside of it that are not as they were.
size_t count_wrong(Side& producer, Side& consumer, uint32_t content) {
  size_t wrong = 0;
  for (uint32_t view = 0; view < kLayers * kPlanes; ++view) {
    const float from = producer.layout.scale(view / kPlanes, view % kPlanes);
    const float to = consumer.layout.scale(view / kPlanes, view % kPlanes);
    const Conversion conversion({producer.layout.element, from}, {consumer.layout.element, to});
    for (uint32_t head = 0; head < kHeads; ++head) {
      for (uint32_t token = 0; token < kSlots; ++token) {
        for (uint32_t column = 0; column < content; ++column) {
          const size_t bytes = element_bytes(consumer.layout.element);
          std::vector<std::byte> expected(bytes, kGuard);
          if (token >= kBegin && token < kEnd) {
            conversion.convert(producer.element(view, head, token, column), 1, expected.data());
          } else if (token >= kEnd) {
            expected.assign(bytes, std::byte{0});
          }
          wrong +=
              std::memcmp(expected.data(), consumer.element(view, head, token, column), bytes) != 0;
        }
      }
    }
  }
  return wrong;
}

TEST_CASE("panels: raw, between element types, scales, block sizes and strides") {
  const ElementType types[] = {ElementType::kFloat32,        ElementType::kFloat16,
                               ElementType::kBFloat16,       ElementType::kFloat8E4M3FN,
                               ElementType::kFloat8E4M3FNUZ, ElementType::kFloat8E5M2};
  for (const std::string& variant : simd_variants()) {
    const SimdVariant in_use(variant);
    for (const ElementType from : types) {
      for (const ElementType to : types) {
        for (const int64_t spread : {1, 3}) {
          CAPTURE(variant);
          CAPTURE(element_name(from));
          CAPTURE(element_name(to));
          CAPTURE(spread);
          Side producer(from, 8, 20, 4 - spread), consumer(to, 24, 20, spread);
          producer.fill_bytes(1);
          if (is_float8(from)) producer.layout.scales = {1.0f, 0.5f, 0.037f, 3.0f};
          if (is_float8(to)) consumer.layout.scales = {1.0f, 0.25f, 0.037f, 1.5f};
          const PanelFormat format = format_of(producer, {});
          const PanelPlan source = producer.plan(format), target = consumer.plan(format);
          const uint32_t panels = source.num_panels();
          const auto wire = packed(source, 0, panels, 7);
          const DecodedChunk chunk = unpack_panels(target, 0, panels, wire.data(), wire.size(), 7);
          CHECK(chunk.digest == digest(wire, 7));
          CHECK(chunk.exceptions == 0);
          zero_tail(target);
          CHECK(count_wrong(producer, consumer, 20) == 0);
          if (from == to) CHECK(chunk.loss.clamped == 0);
        }
      }
    }
  }
}

TEST_CASE("panels: rows that cannot be encoded arrive as they are") {
  Side producer(ElementType::kBFloat16, 8, 20, 2), consumer(ElementType::kBFloat16, 24, 20);
  const uint16_t nan = 0x7fc1, infinity = 0xff80;
  for (uint32_t view = 0; view < kLayers * kPlanes; ++view) {
    for (uint32_t head = 0; head < kHeads; ++head) {
      for (uint32_t token = 0; token < kSlots; ++token) {
        for (uint32_t column = 0; column < 20; ++column) {
          const uint16_t& value = column % 2 == 0 ? nan : infinity;
          std::memcpy(producer.element(view, head, token, column), &value, 2);
        }
      }
    }
  }
  for (const Scheme scheme : {Scheme::kFloat8E4M3, Scheme::kInt8, Scheme::kInt8Channel}) {
    const PanelFormat format = format_of(producer, {scheme, ScaleFormat::kBFloat16, 0});
    const PanelPlan source = producer.plan(format), target = consumer.plan(format);
    std::fill(consumer.memory.begin(), consumer.memory.end(), kGuard);
    uint32_t begin = 0;
    for (const uint32_t end : {1u, 4u, 5u, 40u, source.num_panels()}) {
      const auto wire = packed(source, begin, end, end);
      CHECK(wire.size() == source.most_bytes(begin, end));
      const DecodedChunk chunk = unpack_panels(target, begin, end, wire.data(), wire.size(), end);
      CHECK(chunk.digest == digest(wire, end));
      begin = end;
    }
    zero_tail(target);
    CHECK(count_wrong(producer, consumer, 20) == 0);
  }
}

TEST_CASE("panels: a row that goes raw counts by its elements, never by its codes") {
  constexpr uint32_t kContent = 64, kMarked = 5;  // tokens of the slice: 2 of them marked
  const uint16_t large = 0x4800, one = 0x3f80, nan = 0x7fc0;  // 2^17: too large for float16
  Side producer(ElementType::kBFloat16, 8, kContent), consumer(ElementType::kFloat16, 24, kContent);
  for (uint32_t view = 0; view < kLayers * kPlanes; ++view) {
    for (uint32_t head = 0; head < kHeads; ++head) {
      for (uint32_t token = 0; token < kSlots; ++token) {
        const bool marked = token == kBegin + kMarked || token == kEnd - 1;
        for (uint32_t column = 0; column < kContent; ++column) {
          const uint16_t& value = !marked ? large : column == 7 ? nan : one;
          std::memcpy(producer.element(view, head, token, column), &value, 2);
        }
      }
    }
  }
  constexpr uint64_t kClamped =
      uint64_t{kLayers * kPlanes * kHeads} * (kEnd - kBegin - 2) * kContent;
  for (const std::string& name : simd_variants()) {
    const SimdVariant variant(name);
    for (const Scheme scheme :
         {Scheme::kFloat8E4M3, Scheme::kFloat8E5M2, Scheme::kInt8, Scheme::kInt8Channel}) {
      CAPTURE(name);
      CAPTURE(scheme_name(scheme));
      const PanelFormat format = format_of(producer, {scheme, ScaleFormat::kBFloat16, 0});
      const PanelPlan source = producer.plan(format), target = consumer.plan(format);
      auto wire = packed(source, 0, source.num_panels(), 3);
      // Not what an encoder writes for a marked row: its codes and, where it has one, its scale.
      std::byte* codes = wire.data() + 64;
      std::memset(codes + kMarked * kContent, 0x7b, kContent);
      if (scheme != Scheme::kInt8Channel) {
        std::memcpy(codes + format.panel_tokens * kContent + kMarked * 2, &large, 2);
      }
      const DecodedChunk chunk =
          unpack_panels(target, 0, source.num_panels(), wire.data(), wire.size(), 3);
      CHECK(chunk.exceptions == kLayers * kPlanes * kHeads * 2);
      CHECK(chunk.loss.clamped == kClamped);
      zero_tail(target);
      CHECK(count_wrong(producer, consumer, kContent) == 0);
    }
  }
}

TEST_CASE("panels: whatever the bytes are, only the slice's rows are written") {
  std::mt19937 random(5);
  Side producer(ElementType::kFloat16, 8, 20), consumer(ElementType::kFloat32, 24, 20, 2);
  for (size_t i = 0; i + 1 < producer.memory.size(); i += 2) {
    const uint16_t value = static_cast<uint16_t>(random() % 97 == 0 ? 0x7c00 : random() & 0x3fff);
    std::memcpy(&producer.memory[i], &value, 2);
  }
  PanelFormat format = format_of(producer, {Scheme::kInt8Channel, ScaleFormat::kFloat32, 0});
  format.encodings[1] = {Scheme::kFloat8E5M2, ScaleFormat::kE8M0, 16};
  format.raw_until = 8;
  const PanelPlan source = producer.plan(format), target = consumer.plan(format);
  const uint32_t begin = 2, end = source.num_panels() - 3;
  const auto good = packed(source, begin, end, 0);

  // What a good chunk writes is all that any other may.
  unpack_panels(target, begin, end, good.data(), good.size(), 0);
  std::vector<bool> allowed(consumer.memory.size());
  for (size_t i = 0; i < allowed.size(); i += 4) {
    const bool written = std::any_of(&consumer.memory[i], &consumer.memory[i] + 4,
                                     [](std::byte b) { return b != kGuard; });
    std::fill_n(allowed.begin() + static_cast<std::ptrdiff_t>(i), 4, written);
  }
  REQUIRE(std::count(allowed.begin(), allowed.end(), true) ==
          static_cast<std::ptrdiff_t>(target.memory_bytes(begin, end)));

  size_t refused = 0, decoded = 0, wrong = 0;
  for (int round = 0; round < 2000; ++round) {
    std::vector<std::byte> bad = good;
    const size_t from = random() % 2 == 0 ? 64 : 0;
    for (uint32_t n = random() % 20; n > 0; --n) {
      bad[from + random() % (bad.size() - from)] = static_cast<std::byte>(random());
    }
    if (random() % 4 == 0) bad[20] = static_cast<std::byte>(random());
    if (random() % 4 == 0) bad.resize(random() % (bad.size() + 64));
    bad.shrink_to_fit();
    std::fill(consumer.memory.begin(), consumer.memory.end(), kGuard);
    try {
      unpack_panels(target, begin, end, bad.data(), bad.size(), 0);
      ++decoded;
    } catch (const Error& error) {
      CHECK(error.code() == StatusCode::kProtocol);
      ++refused;
      wrong += std::any_of(consumer.memory.begin(), consumer.memory.end(),
                           [](std::byte b) { return b != kGuard; });
    }
    for (size_t i = 0; i < allowed.size(); ++i) {
      wrong += !allowed[i] && consumer.memory[i] != kGuard;
    }
  }
  CHECK(wrong == 0);
  CHECK(refused > 100);
  CHECK(decoded > 100);
}

TEST_CASE("panels: several threads share a plan") {
  Side producer(ElementType::kBFloat16, 8, 64), consumer(ElementType::kBFloat16, 24, 64);
  producer.fill_bytes(3);
  const PanelFormat format = format_of(producer, {});
  const PanelPlan source = producer.plan(format), target = consumer.plan(format);
  std::vector<std::thread> threads;
  constexpr uint32_t kThreads = 4;
  for (uint32_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      const uint32_t begin = source.num_panels() * i / kThreads;
      const uint32_t end = source.num_panels() * (i + 1) / kThreads;
      std::vector<std::byte> wire(source.most_bytes(begin, end));
      const CodedChunk chunk = pack_panels(source, begin, end, wire.data(), i);
      unpack_panels(target, begin, end, wire.data(), chunk.bytes, i);
    });
  }
  for (std::thread& thread : threads) thread.join();
  zero_tail(target);
  CHECK(count_wrong(producer, consumer, 64) == 0);
}

TEST_CASE("panels: what does not fit is refused") {
  const Side half(ElementType::kFloat16, 8, 20), byte(ElementType::kUInt8, 8, 20),
      fp8(ElementType::kFloat8E4M3FN, 8, 20);
  const auto code_of = [](const Side& side, const PanelFormat& format) {
    try {
      side.plan(format);
    } catch (const Error& error) {
      return error.code();
    }
    return StatusCode::kOk;
  };
  const PanelFormat good = format_of(half, {});
  CHECK(code_of(half, good) == StatusCode::kOk);
  CHECK(code_of(byte, good) == StatusCode::kMismatch);
  PanelFormat bad = good;
  bad.producer_scales[1] = 0.5f;
  CHECK(code_of(half, bad) == StatusCode::kInvalid);
  bad.producer_scales = {1.0f};
  CHECK(code_of(half, bad) == StatusCode::kInvalid);
  bad = format_of(fp8, {});
  for (const float scale : {0.0f, 0x1p-127f, -1.0f, INFINITY, NAN}) {
    bad.producer_scales[3] = scale;
    CHECK(code_of(fp8, bad) == StatusCode::kInvalid);
  }
  bad.producer_scales[3] = 2;
  CHECK(code_of(fp8, bad) == StatusCode::kOk);
  std::byte untouched{0x5a};
  CHECK_THROWS_AS(pack_panels(fp8.plan(bad), 0, 1, &untouched, 0), Error);
  CHECK(untouched == std::byte{0x5a});
}

}  // namespace
}  // namespace kvxfer
