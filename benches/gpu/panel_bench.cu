// Coded chunks on a GPU: first every kernel against the host's chunks, digests and blocks, then
// times. Exits with 1 when a byte is wrong.

#include <cstring>
#include <map>
#include <memory>

#include "bench_shapes.h"
#include "cuda_support.h"
#include "gpu/panel_kernels_by_name.h"
#include "gpu/random_panels.h"
#include "pack/gpu_panel_table.h"
#include "pack/gpu_raw_table.h"

namespace kvxfer::bench {
namespace {

using gpu::PanelLaunch;
using gpu::PanelState;

// All chunks of a plan, each in a slot of its own.
class Coder {
 public:
  Coder(const PanelPlan& plan, const std::vector<uint32_t>& cuts,
        const std::vector<uint64_t>& wires, const std::vector<uint32_t>& bytes, uint32_t per_group)
      : table_(plan),
        count_(static_cast<uint32_t>(cuts.size() - 1)),
        per_group_(per_group),
        states_(count_ * sizeof(PanelState)),
        marks_(table_.rows(0, plan.num_panels())) {
    marks_.fill(0);
    uint64_t marks = marks_.address();
    for (size_t i = 0; i < count_; ++i) {
      table_.add_chunk(cuts[i], cuts[i + 1], wires[i], marks, bytes.empty() ? 0 : bytes[i]);
      marks += table_.rows(cuts[i], cuts[i + 1]);
    }
    launch_ = table_.launch();
    launch_.entries = keep(table_.entries());
    launch_.views = keep(table_.views());
    launch_.codes = keep(table_.codes());
    launch_.kinds = keep(table_.kinds());
    launch_.blocks = keep(table_.blocks());
    launch_.chunks = keep(table_.chunks());
    launch_.header = reinterpret_cast<const unsigned char*>(keep(table_.header()));
    launch_.states = reinterpret_cast<PanelState*>(states_.data());
    launch_.per_group = per_group;
    for (const bool pack : {true, false}) {
      for (const auto& [name, order] : table_.orders(pack)) {
        orders_[pack].push_back(
            {gpu::panel_kernel(name), keep(order), static_cast<uint32_t>(order.size())});
      }
    }
  }

  void pack() {
    check(cudaMemsetAsync(states_.data(), 0, states_.size()), "cudaMemsetAsync");
    check(cudaMemsetAsync(marks_.data(), 0, marks_.size()), "cudaMemsetAsync");
    panels(true);
    kvxfer_finish_chunks<<<count_, gpu::kThreads>>>(launch_);
  }
  void unpack() {
    check(cudaMemsetAsync(states_.data(), 0, states_.size()), "cudaMemsetAsync");
    kvxfer_check_chunks<<<count_, gpu::kThreads>>>(launch_);
    panels(false);
    kvxfer_put_raw_rows<<<count_, gpu::kThreads>>>(launch_);
  }
  void panels(bool pack) {
    for (const Order& order : orders_[pack]) {
      PanelLaunch with = launch_;
      with.order = order.entries;
      with.count = order.count;
      order.kernel<<<(with.count + per_group_ - 1) / per_group_, gpu::kThreads>>>(with);
    }
  }

  std::vector<PanelState> states() const {
    std::vector<PanelState> states(count_);
    states_.download(states.data());
    return states;
  }
  void count_kernels(std::map<std::string, int>& seen) const {
    for (const bool pack : {true, false}) {
      for (const auto& [name, order] : table_.orders(pack)) ++seen[name];
    }
  }

 private:
  struct Order {
    gpu::PanelKernel kernel;
    const uint32_t* entries;
    uint32_t count;
  };
  template <class T>
  const T* keep(const std::vector<T>& values) {
    kept_.push_back(std::make_unique<DeviceBytes>(values));
    return reinterpret_cast<const T*>(kept_.back()->data());
  }

  GpuPanelTable table_;
  uint32_t count_, per_group_;
  DeviceBytes states_, marks_;
  std::vector<std::unique_ptr<DeviceBytes>> kept_;
  std::vector<Order> orders_[2];
  PanelLaunch launch_;
};

Digest digest_of(const PanelState& state, uint64_t seed) {
  return gpu::finish_words(state.digest, state.bytes, seed);
}

struct Side {
  CacheShape shape;
  std::vector<std::byte> host;
  DeviceBytes device;

  explicit Side(const CacheShape& shape)
      : shape(shape), host(shape.bytes(), std::byte{0x5a}), device(shape.bytes()) {
    device.upload(host.data());
  }
  PanelPlan plan(const Request& request, const PanelFormat& format, std::byte* memory) const {
    return PanelPlan(shape.layout(memory), request.table, request.slice, request.plane_of, format);
  }
  bool same() const {
    std::vector<std::byte> found(host.size());
    device.download(found.data());
    return found == host;
  }
};

bool check_case(Random& random, const CacheShape& shape, const Request& request,
                const PanelFormat& format, ElementType target_element,
                std::map<std::string, int>& seen) {
  Side side(shape);
  fill_numbers(random, shape.element, side.host.data(), side.host.size(),
               one_of(random, {0u, 1000u, 60000u}));
  side.device.upload(side.host.data());
  const PanelPlan plan = side.plan(request, format, side.host.data());
  const PanelPlan device_plan = side.plan(request, format, side.device.data());
  const auto cuts = cut_panels(random, plan.num_panels(), between(random, 1, 60));
  const uint32_t per_group = between(random, 1, 5);
  std::vector<uint64_t> offsets;
  uint64_t wire_bytes = 0;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    offsets.push_back(wire_bytes);
    wire_bytes += (plan.most_bytes(cuts[i], cuts[i + 1]) + 63) / 64 * 64;
  }
  DeviceBytes wire(wire_bytes);
  wire.fill(0xa5);
  std::vector<uint64_t> wires;
  for (const uint64_t offset : offsets) wires.push_back(wire.address() + offset);
  Coder packing(device_plan, cuts, wires, {}, per_group);
  packing.count_kernels(seen);
  packing.pack();
  check(cudaDeviceSynchronize(), "pack");
  std::vector<std::byte> got(wire_bytes), expected(wire_bytes, std::byte{0xa5});
  wire.download(got.data());
  std::vector<uint32_t> bytes;
  bool good = true;
  const auto states = packing.states();
  for (size_t i = 0; i < wires.size(); ++i) {
    const CodedChunk chunk =
        pack_panels(plan, cuts[i], cuts[i + 1], expected.data() + offsets[i], 3);
    // The host may have used what is behind the chunk.
    std::fill(expected.begin() + static_cast<std::ptrdiff_t>(offsets[i] + chunk.bytes),
              i + 1 < offsets.size()
                  ? expected.begin() + static_cast<std::ptrdiff_t>(offsets[i + 1])
                  : expected.end(),
              std::byte{0xa5});
    good = good && states[i].bytes == chunk.bytes && states[i].exceptions == chunk.exceptions &&
           digest_of(states[i], 3) == chunk.digest;
    bytes.push_back(chunk.bytes);
  }
  good = good && got == expected;

  CacheShape target = shape;
  target.element = target_element;
  target.head_major = !target.head_major;
  Side to(target);
  const PanelPlan to_plan = to.plan(request, format, to.host.data());
  const PanelPlan to_device = to.plan(request, format, to.device.data());
  wire.upload(expected.data());
  Coder unpacking(to_device, cuts, wires, bytes, per_group);
  unpacking.count_kernels(seen);
  unpacking.unpack();
  check(cudaDeviceSynchronize(), "unpack");
  const auto unpacked = unpacking.states();
  for (size_t i = 0; i < wires.size(); ++i) {
    const DecodedChunk chunk =
        unpack_panels(to_plan, cuts[i], cuts[i + 1], expected.data() + offsets[i], bytes[i], 3);
    good = good && unpacked[i].refused == 0 && digest_of(unpacked[i], 3) == chunk.digest &&
           unpacked[i].clamped == chunk.loss.clamped;
  }
  return good && to.same();
}

bool check_all() {
  const auto seeds = static_cast<uint32_t>(setting("KVXFER_BENCH_SEEDS", 300));
  std::map<std::string, int> seen;
  int wrong = 0;
  for (uint32_t seed = 0; seed < seeds; ++seed) {
    Random random(seed);
    CacheShape shape = random_number_shape(random);
    const bool fast = seed % 2 == 0;
    if (fast) {
      shape.element = one_of(random, {ElementType::kBFloat16, ElementType::kFloat16});
      shape.contents = {one_of(random, {64u, 128u, 256u, 576u})};
      shape.gap = 0;
    }
    const Request request = random_request(random, shape);
    PanelFormat format = random_format(random, shape, request);
    if (fast) {
      format.encodings[0].scheme =
          one_of(random, {Scheme::kFloat8E4M3, Scheme::kFloat8E5M2, Scheme::kInt8});
      format.encodings[0].group = 0;
      format.encodings[0].scale = one_of(random, {ScaleFormat::kBFloat16, ScaleFormat::kFloat32});
    }
    ElementType target = shape.element;
    if (target != ElementType::kUInt8) {
      target = one_of(random, {target, ElementType::kBFloat16, ElementType::kFloat16,
                               ElementType::kFloat32, ElementType::kFloat8E4M3FN});
    }
    if (!check_case(random, shape, request, format, target, seen)) {
      std::printf("WRONG: seed %u\n", seed);
      ++wrong;
    }
  }
  std::printf("panels: %u random caches and codecs, %d wrong\n", seeds, wrong);
  for (const auto& [name, count] : seen) std::printf("  %s %d times\n", name.c_str(), count);
  std::printf("\n");
  return wrong == 0;
}

__global__ void fill_floats(uint32_t* words, uint64_t count) {
  for (uint64_t i = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x; i < count;
       i += uint64_t{gridDim.x} * blockDim.x) {
    uint32_t x = static_cast<uint32_t>(i) * 2654435761u + static_cast<uint32_t>(i >> 32);
    x = (x ^ (x >> 15)) * 0x2c1b3c6du;
    x ^= x >> 13;
    // Two bfloat16 between 2^-4 and 2^4, of either sign.
    words[i] = (x & 0x83ff83ff) + 0x3d803d80;
  }
}

bool time_shape(const BenchShape& shape, Scheme scheme, const char* name, bool both) {
  const auto per_group = static_cast<uint32_t>(setting("KVXFER_BENCH_PANELS", 4));
  const Request request = bench_request(shape);
  DeviceBytes cache(shape.cache.bytes());
  fill_floats<<<4096, 256>>>(reinterpret_cast<uint32_t*>(cache.data()), cache.size() / 4);
  PanelFormat format;
  format.codec = 1;
  format.encodings.assign(shape.cache.contents.size(), {scheme, ScaleFormat::kBFloat16, 0});
  const auto plan_at = [&](std::byte* memory) {
    return PanelPlan(shape.cache.layout(memory), request.table, request.slice, request.plane_of,
                     format);
  };
  const PanelPlan plan = plan_at(cache.data());
  // About 4 MiB of elements a chunk.
  const auto step =
      static_cast<uint32_t>(std::max<uint64_t>(1, (uint64_t{4} << 20) / plan.memory_bytes(0, 1)));
  std::vector<uint32_t> cuts = {0};
  while (cuts.back() < plan.num_panels()) {
    cuts.push_back(std::min(plan.num_panels(), cuts.back() + step));
  }
  std::vector<uint64_t> offsets;
  uint64_t wire_bytes = 0;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    offsets.push_back(wire_bytes);
    wire_bytes += (plan.most_bytes(cuts[i], cuts[i + 1]) + 63) / 64 * 64;
  }
  DeviceBytes wire(wire_bytes);
  std::vector<uint64_t> wires;
  for (const uint64_t offset : offsets) wires.push_back(wire.address() + offset);
  Coder coder(plan, cuts, wires, {}, per_group);
  coder.pack();
  const auto states = coder.states();
  bool good = true;
  std::vector<uint32_t> bytes;
  uint64_t moved = plan.memory_bytes(0, plan.num_panels());
  for (size_t i = 0; i < states.size(); ++i) {
    bytes.push_back(states[i].bytes);
    moved += states[i].bytes;
    good = good && states[i].exceptions == 0;
  }
  for (const size_t i : {size_t{0}, states.size() / 2}) {
    std::vector<std::byte> chunk(bytes[i]);
    wire.download(chunk.data(), offsets[i], chunk.size());
    good = good && digest(chunk, 5) == digest_of(states[i], 5);
  }
  const double copy = copy_ms(moved);
  const auto report = [&](const std::string& work, const std::function<void()>& run) {
    Result{shape.name, shape.layout, work, shape.cache.block_size, moved, time_ms(run), copy}
        .print();
  };
  report(std::string("pack ") + name, [&] { coder.pack(); });
  if (both) {
    DeviceBytes target(cache.size());
    target.fill(0);
    const PanelPlan to = plan_at(target.data());
    Coder unpacking(to, cuts, wires, bytes, per_group);
    report(std::string("unpack ") + name, [&] { unpacking.unpack(); });
    const auto unpacked = unpacking.states();
    for (size_t i = 0; i < states.size(); ++i) {
      good =
          good && unpacked[i].refused == 0 && digest_of(unpacked[i], 5) == digest_of(states[i], 5);
    }
  }
  if (!good) std::printf("WRONG: %s %s %s\n", shape.name.c_str(), shape.layout.c_str(), name);
  return good;
}

}  // namespace
}  // namespace kvxfer::bench

int main(int argc, char** argv) {
  using namespace kvxfer;
  using namespace kvxfer::bench;
  const std::string what = argc > 1 ? argv[1] : "all";
  bool good = true;
  if (what == "check" || what == "all") good = check_all();
  if (what == "time" || what == "all" || what == "sweep") {
    print_table_head();
    for (const BenchShape& shape : bench_shapes(what == "sweep")) {
      good = time_shape(shape, Scheme::kFloat8E4M3, "fp8_e4m3", true) && good;
      if (what != "sweep") good = time_shape(shape, Scheme::kInt8, "int8", true) && good;
    }
    if (what != "sweep") {
      const BenchShape shape = bench_shapes(true)[0];
      good = time_shape(shape, Scheme::kInt8Channel, "int8_channel", true) && good;
    }
  }
  return good ? 0 : 1;
}
