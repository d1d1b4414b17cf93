#include <doctest/doctest.h>

#include <array>
#include <functional>
#include <vector>

#include "gpu/aligned_bytes.h"
#include "gpu/random_cache.h"
#include "kvxfer/pack.h"
#include "kvxfer/status.h"
#include "pack/gpu_kernels.h"
#include "pack/gpu_raw_table.h"

namespace kvxfer::gpu {
namespace {

using RawKernel = void (*)(const RawChunk*, uint64_t*, uint32_t);

RawKernel kernel(bool pack, bool digest, uint32_t width) {
  static constexpr RawKernel kKernels[2][2][3] = {
      {{kvxfer_unpack_raw1_no_digest, kvxfer_unpack_raw4_no_digest, kvxfer_unpack_raw16_no_digest},
       {kvxfer_unpack_raw1, kvxfer_unpack_raw4, kvxfer_unpack_raw16}},
      {{kvxfer_pack_raw1_no_digest, kvxfer_pack_raw4_no_digest, kvxfer_pack_raw16_no_digest},
       {kvxfer_pack_raw1, kvxfer_pack_raw4, kvxfer_pack_raw16}}};
  return kKernels[pack][digest][width == 16 ? 2 : width == 4 ? 1 : 0];
}

RawKernel digest_kernel(uint32_t width) {
  return width == 16 ? kvxfer_digest_raw16 : width == 4 ? kvxfer_digest_raw4 : kvxfer_digest_raw1;
}

struct Launch {
  std::vector<RawChunk> chunks;
  std::vector<uint64_t> digests;
  uint32_t width = 16;
  uint32_t groups = 1;

  Launch(const RawTable& table, const std::vector<uint64_t>& cuts, std::vector<AlignedBytes>& wires,
         uint32_t units) {
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      const auto bytes = static_cast<uint32_t>(cuts[i + 1] - cuts[i]);
      chunks.push_back(table.chunk(cuts[i], cuts[i + 1],
                                   reinterpret_cast<uintptr_t>(wires[i].data()),
                                   reinterpret_cast<uintptr_t>(table.pieces().data())));
      width = std::min(width, table.width(cuts[i], cuts[i + 1]));
      groups = std::max(groups, raw_groups(bytes, units));
    }
    digests.resize(chunks.size() * kDigestWords);
  }

  void run(bool pack, bool digest, uint32_t units) { run(kernel(pack, digest, width), units); }

  void run(RawKernel entry, uint32_t units) {
    Fibers fibers(kThreads, kWave);
    fibers.launch(groups, static_cast<uint32_t>(chunks.size()),
                  [&] { entry(chunks.data(), digests.data(), units); });
  }
};

TEST_CASE("gpu raw: bytes and digests are the host's, for random caches and chunks") {
  std::array<uint32_t, 17> seen = {};
  for (uint32_t seed = 0; seed < 16; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const CacheShape shape = random_shape(random);
    const Request request = random_request(random, shape);
    AlignedBytes memory(shape.bytes());
    fill_random(random, memory.data(), memory.size());
    const CopyPlan plan = request.plan(shape.layout(memory.data()));
    const auto cuts = cut_chunks(plan, between(random, 3000, 60000));
    const uint32_t units = one_of(random, {256u, 1024u, 4096u});
    const bool with_digest = between(random, 0, 3) > 0;

    std::vector<AlignedBytes> expected, wires;
    std::vector<Digest> digests;
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      expected.emplace_back(cuts[i + 1] - cuts[i]);
      wires.emplace_back(cuts[i + 1] - cuts[i]);
      digests.push_back(pack(plan, cuts[i], cuts[i + 1], expected[i].data(), seed, with_digest));
    }
    const RawTable table(plan);
    Launch packing(table, cuts, wires, units);
    packing.run(true, with_digest, units);
    ++seen[packing.width];
    for (size_t i = 0; i < wires.size(); ++i) {
      CHECK(wires[i] == expected[i]);
      if (with_digest) {
        CHECK(finish_words(&packing.digests[i * kDigestWords], wires[i].size(), seed) ==
              digests[i]);
      }
    }

    std::vector<AlignedBytes> untouched;
    for (size_t i = 0; i + 1 < cuts.size(); ++i) untouched.emplace_back(16, 0x5a);
    Launch digesting(table, cuts, untouched, units);
    digesting.run(digest_kernel(digesting.width), units);
    for (size_t i = 0; i < untouched.size(); ++i) {
      CHECK(finish_words(&digesting.digests[i * kDigestWords], wires[i].size(), seed) ==
            digest({wires[i].data(), wires[i].size()}, seed));
      CHECK(untouched[i] == AlignedBytes(16, 0x5a));
    }

    AlignedBytes to(shape.bytes(), 0x5a), reference(shape.bytes(), 0x5a);
    const CopyPlan to_plan = request.plan(shape.layout(to.data()));
    const CopyPlan reference_plan = request.plan(shape.layout(reference.data()));
    const RawTable to_table(to_plan);
    Launch unpacking(to_table, cuts, wires, units);
    unpacking.run(false, with_digest, units);
    for (size_t i = 0; i < wires.size(); ++i) {
      unpack(reference_plan, cuts[i], cuts[i + 1], expected[i].data(), seed, false);
      if (with_digest) {
        CHECK(finish_words(&unpacking.digests[i * kDigestWords], wires[i].size(), seed) ==
              digests[i]);
      }
    }
    CHECK(to == reference);
  }
  CHECK(seen[1] > 0);
  CHECK(seen[4] > 0);
  CHECK(seen[16] > 0);
}

TEST_CASE("gpu raw: a flipped bit and exchanged words show in the digest of unpack") {
  CacheShape shape;
  shape.contents = {128};
  Random random(1);
  const Request request = random_request(random, shape);
  AlignedBytes memory(shape.bytes());
  fill_random(random, memory.data(), memory.size());
  const CopyPlan plan = request.plan(shape.layout(memory.data()));
  const std::vector<uint64_t> cuts = {0, plan.wire_bytes()};
  std::vector<AlignedBytes> wires;
  wires.emplace_back(plan.wire_bytes());
  const Digest sent = pack(plan, 0, plan.wire_bytes(), wires[0].data(), 9);
  const RawTable table(plan);
  const auto digest_of = [&] {
    Launch launch(table, cuts, wires, 1024);
    launch.run(false, true, 1024);
    return finish_words(launch.digests.data(), wires[0].size(), 9);
  };
  CHECK(digest_of() == sent);
  wires[0].data()[100] ^= std::byte{4};
  CHECK(digest_of().sum != sent.sum);
  wires[0].data()[100] ^= std::byte{4};
  std::swap_ranges(wires[0].data(), wires[0].data() + 8, wires[0].data() + 64);
  CHECK(digest_of().sum == sent.sum);
  CHECK(digest_of().mix != sent.mix);
}

TEST_CASE("gpu raw: the divider is exact") {
  Random random(3);
  for (int i = 0; i < 3000; ++i) {
    const uint32_t divisor = between(random, 1, 1u << between(random, 0, 30));
    const Divider divider = make_divider(divisor);
    const uint32_t n = between(random, 0, 0x7fffffff);
    const uint32_t whole = n - n % divisor;
    CHECK(divide(n, divider) == n / divisor);
    CHECK(divide(whole, divider) == whole / divisor);
    if (whole > 0) CHECK(divide(whole - 1, divider) == (whole - 1) / divisor);
  }
}

TEST_CASE("gpu raw: a chunk that cannot be moved is refused") {
  CacheShape shape;
  shape.contents = {128};
  Random random(1);
  AlignedBytes memory(shape.bytes());
  const CopyPlan plan = random_request(random, shape).plan(shape.layout(memory.data()));
  const RawTable table(plan);
  CHECK_THROWS_AS(table.chunk(0, plan.wire_bytes() + 1, 4096, 0), Error);
  CHECK_THROWS_AS(table.chunk(0, plan.wire_bytes(), 4097, 0), Error);
  CHECK_THROWS_AS(table.chunk(256, 0, 4096, 0), Error);
}

}  // namespace
}  // namespace kvxfer::gpu
