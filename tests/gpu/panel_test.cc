#include <doctest/doctest.h>

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gpu/aligned_bytes.h"
#include "gpu/panel_kernels_by_name.h"
#include "gpu/random_panels.h"
#include "kvxfer/status.h"
#include "pack/gpu_panel_table.h"
#include "pack/gpu_raw_table.h"

namespace kvxfer::gpu {
namespace {

// Runs the kernels of some chunks as the runtime does on a device.
class Launcher {
 public:
  Launcher(const PanelPlan& plan, const std::vector<uint32_t>& cuts,
           std::vector<AlignedBytes>& wires, const std::vector<uint64_t>& bytes)
      : table_(plan), states_(cuts.size() - 1), marks_(table_.rows(0, plan.num_panels()), 0) {
    uint64_t marks = reinterpret_cast<uintptr_t>(marks_.data());
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      table_.add_chunk(cuts[i], cuts[i + 1], reinterpret_cast<uintptr_t>(wires[i].data()), marks,
                       bytes.empty() ? 0 : bytes[i]);
      marks += table_.rows(cuts[i], cuts[i + 1]);
    }
  }

  void pack(uint32_t per_group) {
    run_orders(true, per_group);
    run_chunks(kvxfer_finish_chunks);
  }
  void unpack(uint32_t per_group) {
    run_chunks(kvxfer_check_chunks);
    run_orders(false, per_group);
    run_chunks(kvxfer_put_raw_rows);
  }

  const PanelState& state(size_t i) const { return states_[i]; }
  Digest digest(size_t i, uint64_t seed) const {
    return finish_words(states_[i].digest, states_[i].bytes, seed);
  }
  void count_kernels(std::map<std::string, int>& seen) const {
    for (const bool packs : {true, false}) {
      for (const auto& [name, order] : table_.orders(packs)) ++seen[name];
    }
  }

 private:
  PanelLaunch launch() {
    PanelLaunch launch = table_.launch();
    launch.entries = table_.entries().data();
    launch.views = table_.views().data();
    launch.kinds = table_.kinds().data();
    launch.codes = table_.codes().data();
    launch.blocks = table_.blocks().data();
    launch.chunks = table_.chunks().data();
    launch.header = reinterpret_cast<const unsigned char*>(table_.header().data());
    launch.states = states_.data();
    return launch;
  }
  void run_orders(bool packs, uint32_t per_group) {
    for (const auto& [name, order] : table_.orders(packs)) {
      PanelLaunch with = launch();
      with.order = order.data();
      with.count = static_cast<uint32_t>(order.size());
      with.per_group = per_group;
      const PanelKernel kernel = panel_kernel(name);
      fibers_.launch((with.count + per_group - 1) / per_group, 1, [&] { kernel(with); });
    }
  }
  void run_chunks(PanelKernel kernel) {
    const PanelLaunch with = launch();
    fibers_.launch(static_cast<uint32_t>(states_.size()), 1, [&] { kernel(with); });
  }

  GpuPanelTable table_;
  std::vector<PanelState> states_;
  AlignedBytes marks_;
  Fibers fibers_{kThreads, kWave};
};

struct Case {
  CacheShape shape;
  Request request;
  PanelFormat format;

  explicit Case(Random& random) : shape(random_number_shape(random)) {
    shape.layers = between(random, 1, 2);
    shape.blocks = between(random, 1, 5);
    request = random_request(random, shape);
    format = random_format(random, shape, request);
  }
  PanelPlan plan(std::byte* memory) const { return with(shape, memory); }
  PanelPlan with(const CacheShape& side, std::byte* memory) const {
    return PanelPlan(side.layout(memory), request.table, request.slice, request.plane_of, format);
  }
};

std::vector<AlignedBytes> make_wires(const PanelPlan& plan, const std::vector<uint32_t>& cuts) {
  std::vector<AlignedBytes> wires;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    wires.emplace_back(plan.most_bytes(cuts[i], cuts[i + 1]));
  }
  return wires;
}

TEST_CASE("gpu panels: chunks, digests and blocks are the host's, for random caches and codecs") {
  std::map<std::string, int> seen;
  int exceptions = 0;
  for (uint32_t seed = 0; seed < 40; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const Case made(random);
    AlignedBytes memory(made.shape.bytes());
    fill_numbers(random, made.shape.element, memory.data(), memory.size(),
                 one_of(random, {0u, 1000u, 60000u}));
    const PanelPlan plan = made.plan(memory.data());
    const auto cuts = cut_panels(random, plan.num_panels(), between(random, 1, 6));
    const uint32_t per_group = between(random, 1, 3);
    auto wires = make_wires(plan, cuts);
    auto expected = make_wires(plan, cuts);
    Launcher packing(plan, cuts, wires, {});
    packing.count_kernels(seen);
    packing.pack(per_group);
    std::vector<uint64_t> bytes;
    for (size_t i = 0; i < wires.size(); ++i) {
      const CodedChunk chunk = pack_panels(plan, cuts[i], cuts[i + 1], expected[i].data(), seed);
      CHECK(packing.state(i).bytes == chunk.bytes);
      CHECK(packing.state(i).exceptions == chunk.exceptions);
      CHECK(packing.digest(i, seed) == chunk.digest);
      CHECK(std::memcmp(wires[i].data(), expected[i].data(), chunk.bytes) == 0);
      bytes.push_back(chunk.bytes);
      exceptions += static_cast<int>(chunk.exceptions);
    }

    CacheShape target = made.shape;
    if (target.element != ElementType::kUInt8) {
      target.element = one_of(
          random, {ElementType::kBFloat16, ElementType::kFloat16, ElementType::kFloat32,
                   ElementType::kFloat8E4M3FN, ElementType::kFloat8E5M2FNUZ, target.element});
    }
    target.head_major = !target.head_major;
    AlignedBytes to(target.bytes(), 0x5a), reference(target.bytes(), 0x5a);
    const PanelPlan to_plan = made.with(target, to.data());
    const PanelPlan reference_plan = made.with(target, reference.data());
    Launcher unpacking(to_plan, cuts, expected, bytes);
    unpacking.count_kernels(seen);
    unpacking.unpack(per_group);
    for (size_t i = 0; i < wires.size(); ++i) {
      const DecodedChunk chunk =
          unpack_panels(reference_plan, cuts[i], cuts[i + 1], expected[i].data(), bytes[i], seed);
      CHECK(unpacking.state(i).refused == 0);
      CHECK(unpacking.state(i).clamped == chunk.loss.clamped);
      CHECK(unpacking.digest(i, seed) == chunk.digest);
    }
    CHECK(to == reference);
  }
  CHECK(exceptions > 0);
  CHECK(seen["kvxfer_pack_panels"] > 0);
  CHECK(seen["kvxfer_unpack_panels"] > 0);
  CHECK(seen.size() > 4);
}

TEST_CASE("gpu panels: every fast kernel, panels that start and end anywhere, any code") {
  for (const ElementType element : {ElementType::kBFloat16, ElementType::kFloat16}) {
    for (const Scheme scheme : {Scheme::kFloat8E4M3, Scheme::kFloat8E5M2, Scheme::kInt8}) {
      for (const uint32_t content : {64u, 128u, 256u, 576u}) {
        CAPTURE(static_cast<int>(element));
        CAPTURE(static_cast<int>(scheme));
        CAPTURE(content);
        Random random(content + static_cast<uint32_t>(scheme));
        Case made(random);
        made.shape.element = element;
        made.shape.contents = {content};
        made.shape.gap = 32;
        made.shape.block_size = 16;
        made.shape.blocks = 5;
        made.shape.heads = 2;
        made.shape.layers = 1;
        made.request = random_request(random, made.shape);
        made.request.slice.token_begin = made.request.table.first_token;
        made.format = {};
        made.format.panel_tokens = 37;
        made.format.producer_element = element;
        const auto scale =
            one_of(random, {ScaleFormat::kFloat32, ScaleFormat::kBFloat16, ScaleFormat::kE8M0});
        made.format.encodings = {
            {scheme, scheme == Scheme::kInt8 ? ScaleFormat::kBFloat16 : scale, 0}};
        AlignedBytes memory(made.shape.bytes());
        fill_numbers(random, element, memory.data(), memory.size(), 500);
        const PanelPlan plan = made.plan(memory.data());
        const std::vector<uint32_t> cuts = {0, plan.num_panels()};
        auto wires = make_wires(plan, cuts);
        auto expected = make_wires(plan, cuts);
        Launcher packing(plan, cuts, wires, {});
        std::map<std::string, int> seen;
        packing.count_kernels(seen);
        CHECK(seen.count("kvxfer_pack_panels") == 0);
        CHECK(seen.count("kvxfer_unpack_panels") == 0);
        packing.pack(3);
        const CodedChunk chunk = pack_panels(plan, 0, cuts[1], expected[0].data(), 1);
        CHECK(packing.digest(0, 1) == chunk.digest);
        CHECK(std::memcmp(wires[0].data(), expected[0].data(), chunk.bytes) == 0);
        // Codes that no encoder makes.
        const uint64_t first = (24 + 8 + 63) / 64 * 64;
        for (uint64_t i = first; i < first + content * 8; ++i) {
          expected[0].data()[i] = static_cast<std::byte>(random());
        }
        AlignedBytes to(made.shape.bytes(), 0x5a), reference(made.shape.bytes(), 0x5a);
        const PanelPlan to_plan = made.plan(to.data());
        Launcher unpacking(to_plan, cuts, expected, {chunk.bytes});
        unpacking.unpack(2);
        const PanelPlan reference_plan = made.plan(reference.data());
        const DecodedChunk decoded =
            unpack_panels(reference_plan, 0, cuts[1], expected[0].data(), chunk.bytes, 1);
        CHECK(unpacking.digest(0, 1) == decoded.digest);
        CHECK(unpacking.state(0).clamped == decoded.loss.clamped);
        CHECK(to == reference);
      }
    }
  }
}

TEST_CASE("gpu panels: a row that goes raw counts by its elements, never by its codes") {
  constexpr uint32_t kContent = 128, kTokens = 40, kMarked = 5;
  const uint16_t large = 0x4800, one = 0x3f80, nan = 0x7fc0;  // 2^17: too large for float16
  for (const Scheme scheme :
       {Scheme::kFloat8E4M3, Scheme::kFloat8E5M2, Scheme::kInt8, Scheme::kInt8Channel}) {
    CAPTURE(static_cast<int>(scheme));
    Random random(9);
    Case made(random);
    made.shape = {};
    made.shape.element = ElementType::kBFloat16;
    made.shape.contents = {kContent};
    made.shape.block_size = 16;
    made.shape.blocks = 3;
    made.shape.heads = 2;
    made.shape.layers = 1;
    made.request = {};
    made.request.slice = {{0}, 0, 2, 0, kTokens};
    made.request.table.blocks = {2, 0, 1};
    made.request.plane_of = {0};
    made.format = {};
    made.format.panel_tokens = kTokens;
    made.format.producer_element = ElementType::kBFloat16;
    made.format.encodings = {{scheme, ScaleFormat::kBFloat16, 0}};
    AlignedBytes memory(made.shape.bytes());
    for (size_t i = 0; i < memory.size(); i += 2) std::memcpy(memory.data() + i, &large, 2);
    const CacheLayout layout = made.shape.layout(memory.data());
    for (uint32_t head = 0; head < 2; ++head) {
      const PlaneView& view = layout.views[0];
      std::byte* row = view.data + made.request.table.blocks[0] * view.block_stride +
                       head * view.head_stride + kMarked * view.token_stride;
      for (uint32_t c = 0; c < kContent; ++c) std::memcpy(row + c * 2, c == 7 ? &nan : &one, 2);
    }
    const PanelPlan plan = made.plan(memory.data());
    const std::vector<uint32_t> cuts = {0, plan.num_panels()};
    auto wires = make_wires(plan, cuts);
    const CodedChunk chunk = pack_panels(plan, 0, cuts[1], wires[0].data(), 1);
    // Not what an encoder writes for a marked row: its codes and, where it has one, its scale.
    std::byte* codes = wires[0].data() + 64;
    std::memset(codes + kMarked * kContent, 0x7b, kContent);
    if (scheme != Scheme::kInt8Channel) {
      std::memcpy(codes + kTokens * kContent + kMarked * 2, &large, 2);
    }
    CacheShape target = made.shape;
    target.element = ElementType::kFloat16;
    AlignedBytes to(target.bytes(), 0x5a), reference(target.bytes(), 0x5a);
    const PanelPlan to_plan = made.with(target, to.data());
    const PanelPlan reference_plan = made.with(target, reference.data());
    Launcher unpacking(to_plan, cuts, wires, {chunk.bytes});
    std::map<std::string, int> seen;
    unpacking.count_kernels(seen);
    CHECK(seen.count("kvxfer_unpack_panels") == (scheme == Scheme::kInt8Channel ? 1 : 0));
    unpacking.unpack(1);
    const DecodedChunk decoded =
        unpack_panels(reference_plan, 0, cuts[1], wires[0].data(), chunk.bytes, 1);
    CHECK(decoded.exceptions == 2);
    CHECK(decoded.loss.clamped == 2 * (kTokens - 1) * kContent);
    CHECK(unpacking.state(0).exceptions == 2);
    CHECK(unpacking.state(0).clamped == decoded.loss.clamped);
    CHECK(unpacking.digest(0, 1) == decoded.digest);
    CHECK(to == reference);
  }
}

TEST_CASE("gpu panels: a chunk that the host would refuse is refused, and nothing is written") {
  int refused = 0;
  for (uint32_t seed = 0; seed < 40; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const Case made(random);
    AlignedBytes memory(made.shape.bytes());
    fill_numbers(random, made.shape.element, memory.data(), memory.size(), 30000);
    const PanelPlan plan = made.plan(memory.data());
    const std::vector<uint32_t> cuts = {0, plan.num_panels()};
    auto wires = make_wires(plan, cuts);
    CodedChunk chunk = pack_panels(plan, 0, cuts[1], wires[0].data(), seed);
    const uint64_t tail = plan.most_bytes(0, cuts[1]) > chunk.bytes ? 16 : 0;
    uint64_t at = between(random, 0, 63);
    if (chunk.exceptions > 0 && between(random, 0, 1) == 1) {
      // In the indices, which stand before the raw rows.
      at = chunk.bytes - std::min<uint64_t>(chunk.bytes - 64, between(random, 1, 4000));
    }
    wires[0].data()[at] ^= static_cast<std::byte>(1u << between(random, 0, 7));
    if (between(random, 0, 7) == 0) chunk.bytes += static_cast<uint32_t>(tail);
    bool host_refuses = false;
    AlignedBytes reference(made.shape.bytes(), 0x5a), to(made.shape.bytes(), 0x5a);
    const PanelPlan reference_plan = made.plan(reference.data());
    try {
      unpack_panels(reference_plan, 0, cuts[1], wires[0].data(), chunk.bytes, seed);
    } catch (const Error& error) {
      host_refuses = true;
    }
    const PanelPlan to_plan = made.plan(to.data());
    Launcher unpacking(to_plan, cuts, wires, {chunk.bytes});
    unpacking.unpack(1);
    CHECK((unpacking.state(0).refused != 0) == host_refuses);
    CHECK(to == reference);
    refused += host_refuses ? 1 : 0;
  }
  CHECK(refused > 5);
  CHECK(refused < 40);
}

TEST_CASE("gpu panels: 8-bit floats become others, of other scales, as on the host") {
  uint64_t clamped = 0, inexact = 0;
  std::set<std::pair<ElementType, ElementType>> seen;
  for (uint32_t seed = 0; seed < 60; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    Case made(random);
    const auto float8 = [&] {
      return one_of(random, {ElementType::kFloat8E4M3FN, ElementType::kFloat8E4M3FNUZ,
                             ElementType::kFloat8E5M2, ElementType::kFloat8E5M2FNUZ});
    };
    const auto scales = [&] {
      std::vector<float> some(made.shape.layers * made.shape.contents.size(), 1.0f);
      for (float& scale : some) scale = one_of(random, {1.0f, 0.5f, 0.037f, 64.0f});
      return some;
    };
    made.shape.element = float8();
    made.shape.gap = 0;
    made.format.producer_element = made.shape.element;
    made.format.producer_scales = scales();
    for (Encoding& encoding : made.format.encodings) encoding = {};
    AlignedBytes memory(made.shape.bytes());
    for (size_t i = 0; i < memory.size(); ++i) memory.data()[i] = std::byte(random());
    CacheLayout source = made.shape.layout(memory.data());
    source.scales = made.format.producer_scales;
    const PanelPlan plan(source, made.request.table, made.request.slice, made.request.plane_of,
                         made.format);
    const std::vector<uint32_t> cuts = {0, plan.num_panels()};
    auto wires = make_wires(plan, cuts);
    const CodedChunk chunk = pack_panels(plan, 0, cuts[1], wires[0].data(), seed);

    CacheShape target = made.shape;
    target.element = between(random, 0, 1) == 0
                         ? float8()
                         : one_of(random, {ElementType::kBFloat16, ElementType::kFloat16,
                                           ElementType::kFloat32});
    seen.emplace(made.shape.element, target.element);
    AlignedBytes to(target.bytes(), 0x5a), reference(target.bytes(), 0x5a);
    const std::vector<float> own = is_float8(target.element) ? scales() : std::vector<float>{};
    const auto plan_into = [&](AlignedBytes& bytes) {
      CacheLayout layout = target.layout(bytes.data());
      layout.scales = own;
      return PanelPlan(layout, made.request.table, made.request.slice, made.request.plane_of,
                       made.format);
    };
    const PanelPlan to_plan = plan_into(to), reference_plan = plan_into(reference);
    const DecodedChunk decoded =
        unpack_panels(reference_plan, 0, cuts[1], wires[0].data(), chunk.bytes, seed);
    Launcher unpacking(to_plan, cuts, wires, {chunk.bytes});
    unpacking.unpack(between(random, 1, 3));
    CHECK(unpacking.digest(0, seed) == chunk.digest);
    CHECK(unpacking.state(0).clamped == decoded.loss.clamped);
    CHECK(unpacking.state(0).inexact == decoded.loss.inexact);
    CHECK(to == reference);
    clamped += decoded.loss.clamped;
    inexact += decoded.loss.inexact;
  }
  CHECK(clamped > 0);
  CHECK(inexact > 0);
  CHECK(seen.size() > 12);
}

TEST_CASE("gpu panels: what kernels do not do is refused") {
  Random random(5);
  const Case made(random);
  AlignedBytes memory(made.shape.bytes());
  const PanelPlan plan = made.plan(memory.data());
  GpuPanelTable table(plan);
  CHECK_THROWS_AS(table.add_chunk(0, plan.num_panels() + 1, 0, 0), Error);
  CHECK_THROWS_AS(table.add_chunk(0, plan.num_panels(), 8, 0), Error);
}

}  // namespace
}  // namespace kvxfer::gpu
