// Raw pack and unpack on a GPU: first every kernel against the host's bytes and digests, then
// times. Exits with 1 when a byte is wrong.

#include <chrono>
#include <cstring>
#include <map>

#include "bench_shapes.h"
#include "cuda_support.h"
#include "kvxfer/pack.h"
#include "pack/gpu_kernels.h"
#include "pack/gpu_raw_table.h"

namespace kvxfer::bench {
namespace {

using gpu::kDigestWords;
using gpu::RawChunk;

using RawKernel = void (*)(const RawChunk*, uint64_t*, uint32_t);

RawKernel kernel(bool pack, bool digest, uint32_t width) {
  static const RawKernel kKernels[2][2][3] = {
      {{kvxfer_unpack_raw1_no_digest, kvxfer_unpack_raw4_no_digest, kvxfer_unpack_raw16_no_digest},
       {kvxfer_unpack_raw1, kvxfer_unpack_raw4, kvxfer_unpack_raw16}},
      {{kvxfer_pack_raw1_no_digest, kvxfer_pack_raw4_no_digest, kvxfer_pack_raw16_no_digest},
       {kvxfer_pack_raw1, kvxfer_pack_raw4, kvxfer_pack_raw16}}};
  return kKernels[pack][digest][width == 16 ? 2 : width == 4 ? 1 : 0];
}

uint64_t up64(uint64_t bytes) { return (bytes + 63) / 64 * 64; }

// All chunks of a plan, in one launch. The wire is one buffer, a chunk behind the other.
class Mover {
 public:
  Mover(const CopyPlan& plan, const std::vector<uint64_t>& cuts, uint64_t wire, uint32_t units)
      : table_(plan),
        pieces_(table_.pieces()),
        units_(units),
        chunks_(make(cuts, wire)),
        digests_((cuts.size() - 1) * kDigestWords * 8) {}

  void launch(bool pack, bool digest) {
    if (digest) check(cudaMemsetAsync(digests_.data(), 0, digests_.size()), "cudaMemsetAsync");
    kernel(pack, digest, width_)<<<dim3(groups_, count_), gpu::kThreads>>>(
        reinterpret_cast<const RawChunk*>(chunks_.data()),
        reinterpret_cast<uint64_t*>(digests_.data()), units_);
  }

  std::vector<Digest> digests(const std::vector<uint64_t>& cuts, uint64_t seed) const {
    std::vector<uint64_t> words(count_ * kDigestWords);
    digests_.download(words.data());
    std::vector<Digest> result;
    for (size_t i = 0; i < count_; ++i) {
      result.push_back(gpu::finish_words(&words[i * kDigestWords], cuts[i + 1] - cuts[i], seed));
    }
    return result;
  }

  uint32_t width() const { return width_; }
  size_t table_bytes() const { return pieces_.size(); }

 private:
  std::vector<RawChunk> make(const std::vector<uint64_t>& cuts, uint64_t wire) {
    std::vector<RawChunk> chunks;
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      chunks.push_back(table_.chunk(cuts[i], cuts[i + 1], wire, pieces_.address()));
      width_ = std::min(width_, table_.width(cuts[i], cuts[i + 1]));
      groups_ = std::max(groups_, gpu::raw_groups(chunks.back().bytes, units_));
      wire += up64(chunks.back().bytes);
    }
    count_ = static_cast<uint32_t>(chunks.size());
    return chunks;
  }

  uint32_t width_ = 16, groups_ = 1, count_ = 0;
  gpu::RawTable table_;
  DeviceBytes pieces_;
  uint32_t units_;
  DeviceBytes chunks_, digests_;
};

uint64_t wire_size(const std::vector<uint64_t>& cuts) {
  uint64_t bytes = 0;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) bytes += up64(cuts[i + 1] - cuts[i]);
  return bytes;
}

bool check_one(uint32_t seed, std::map<uint32_t, int>& widths) {
  Random random(seed);
  const CacheShape shape = random_shape(random);
  const Request request = random_request(random, shape);
  std::vector<std::byte> memory(shape.bytes());
  fill_random(random, memory.data(), memory.size());
  const CopyPlan host_plan = request.plan(shape.layout(memory.data()));
  const auto cuts = cut_chunks(host_plan, between(random, 1, 60000));
  const uint32_t units = one_of(random, {4u, 64u, 1024u, 4096u});
  const bool with_digest = between(random, 0, 3) > 0;

  const DeviceBytes cache(memory);
  DeviceBytes wire(wire_size(cuts));
  wire.fill(0xa5);
  Mover packing(request.plan(shape.layout(cache.data())), cuts, wire.address(), units);
  packing.launch(true, with_digest);
  check(cudaDeviceSynchronize(), "pack");
  ++widths[packing.width()];
  std::vector<std::byte> got(wire.size()), expected(wire.size(), std::byte{0xa5});
  wire.download(got.data());
  std::vector<Digest> digests;
  for (size_t i = 0, at = 0; i + 1 < cuts.size(); at += up64(cuts[i + 1] - cuts[i]), ++i) {
    digests.push_back(pack(host_plan, cuts[i], cuts[i + 1], expected.data() + at, seed));
  }
  bool good = got == expected;
  if (with_digest) good = good && packing.digests(cuts, seed) == digests;

  std::vector<std::byte> target(shape.bytes(), std::byte{0x5a});
  DeviceBytes device_target(target);
  Mover unpacking(request.plan(shape.layout(device_target.data())), cuts, wire.address(), units);
  unpacking.launch(false, with_digest);
  check(cudaDeviceSynchronize(), "unpack");
  const CopyPlan target_plan = request.plan(shape.layout(target.data()));
  for (size_t i = 0, at = 0; i + 1 < cuts.size(); at += up64(cuts[i + 1] - cuts[i]), ++i) {
    unpack(target_plan, cuts[i], cuts[i + 1], expected.data() + at, seed, false);
  }
  std::vector<std::byte> unpacked(target.size());
  device_target.download(unpacked.data());
  good = good && unpacked == target;
  if (with_digest) good = good && unpacking.digests(cuts, seed) == digests;
  if (!good) std::printf("WRONG: seed %u, width %u\n", seed, packing.width());
  return good;
}

bool check_all() {
  int wrong = 0;
  std::map<uint32_t, int> widths;
  const auto seeds = static_cast<uint32_t>(setting("KVXFER_BENCH_SEEDS", 300));
  for (uint32_t seed = 0; seed < seeds; ++seed) wrong += check_one(seed, widths) ? 0 : 1;
  std::printf("raw: %u random caches, %d wrong; accesses of", seeds, wrong);
  for (const auto& [width, count] : widths) std::printf(" %u bytes %d times", width, count);
  std::printf("\n\n");
  return wrong == 0;
}

__global__ void fill_cache(uint32_t* words, uint64_t count) {
  for (uint64_t i = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x; i < count;
       i += uint64_t{gridDim.x} * blockDim.x) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u + static_cast<uint32_t>(i >> 32);
    x = (x ^ (x >> 15)) * 0x2c1b3c6du;
    words[i] = x ^ (x >> 13);
  }
}

bool time_shape(const BenchShape& shape, bool all) {
  const auto units = static_cast<uint32_t>(setting("KVXFER_BENCH_UNITS", 4096));
  const Request request = bench_request(shape);
  DeviceBytes cache(shape.cache.bytes());
  fill_cache<<<4096, 256>>>(reinterpret_cast<uint32_t*>(cache.data()), cache.size() / 4);
  const CopyPlan plan = request.plan(shape.cache.layout(cache.data()));
  const auto cuts = cut_chunks(plan, uint64_t{4} << 20);
  DeviceBytes wire(wire_size(cuts));
  const auto before = std::chrono::steady_clock::now();
  Mover mover(plan, cuts, wire.address(), units);
  const std::chrono::duration<double, std::milli> planning =
      std::chrono::steady_clock::now() - before;

  mover.launch(true, true);
  const auto packed = mover.digests(cuts, 5);
  bool good = true;
  for (const size_t i : {size_t{0}, cuts.size() / 2 - 1}) {
    uint64_t at = 0;
    for (size_t k = 0; k < i; ++k) at += up64(cuts[k + 1] - cuts[k]);
    std::vector<std::byte> bytes(cuts[i + 1] - cuts[i]);
    wire.download(bytes.data(), at, bytes.size());
    good = good && digest(bytes, 5) == packed[i];
  }
  const uint64_t moved = 2 * plan.wire_bytes();
  const double copy = copy_ms(moved);
  const auto report = [&](const char* work, bool pack, bool digest) {
    const double ms = time_ms([&] { mover.launch(pack, digest); });
    Result{shape.name, shape.layout, work, shape.cache.block_size, moved, ms, copy}.print();
  };
  report("pack raw", true, true);
  if (all) report("pack raw, no digest", true, false);
  {
    // Into a second cache, and from there back: nothing may have changed.
    DeviceBytes target(cache.size());
    target.fill(0);
    const CopyPlan to_plan = request.plan(shape.cache.layout(target.data()));
    Mover unpacking(to_plan, cuts, wire.address(), units);
    unpacking.launch(false, true);
    good = good && unpacking.digests(cuts, 5) == packed;
    const double ms = time_ms([&] { unpacking.launch(false, true); });
    Result{shape.name, shape.layout, "unpack raw", shape.cache.block_size, moved, ms, copy}.print();
    wire.fill(0);
    unpacking.launch(true, true);
    good = good && unpacking.digests(cuts, 5) == packed;
  }
  if (!good) std::printf("WRONG: %s %s\n", shape.name.c_str(), shape.layout.c_str());
  if (all) {
    std::fprintf(stderr, "%s %s %u: table %.2f MB, made and uploaded in %.2f ms\n",
                 shape.name.c_str(), shape.layout.c_str(), shape.cache.block_size,
                 static_cast<double>(mover.table_bytes()) / 1e6, planning.count());
  }
  return good;
}

}  // namespace
}  // namespace kvxfer::bench

int main(int argc, char** argv) {
  using namespace kvxfer::bench;
  const std::string what = argc > 1 ? argv[1] : "all";
  bool good = true;
  if (what == "check" || what == "all") good = check_all();
  if (what == "time" || what == "all" || what == "sweep") {
    print_table_head();
    for (const BenchShape& shape : bench_shapes(what == "sweep")) {
      good = time_shape(shape, what != "sweep") && good;
    }
  }
  return good ? 0 : 1;
}
