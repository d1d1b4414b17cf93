#include "pack/gpu_packer.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "kvxfer/status.h"
#include "pack/gpu_lane.h"
#include "pack/gpu_panel_table.h"
#include "pack/gpu_raw_table.h"
#include "pack/kernel_names.h"

namespace kvxfer {
namespace {

using gpu::kThreads;
using gpu::PanelLaunch;
using gpu::PanelState;
using gpu::RawChunk;

// 16-byte pieces that a workgroup moves, and panels that it codes: enough workgroups to fill a
// device with one chunk of a few MiB.
constexpr uint32_t kUnits = 1024;
constexpr uint32_t kPanelsPerGroup = 1;

constexpr size_t up16(size_t bytes) { return (bytes + 15) / 16 * 16; }

template <class T>
size_t room(const std::vector<T>& values) {
  return up16(values.size() * sizeof(T));
}

}  // namespace

// A lane and the current device, for the time of one call.
class GpuPacker::Lease {
 public:
  // Who is told to hurry gives up what only reads. What writes into a cache, or into a peer's
  // memory, is waited for, for nobody else may have that memory meanwhile.
  Lease(GpuPacker& packer, bool writes)
      : packer_(packer),
        current_(packer.runtime_, packer.device_),
        writes_(writes),
        lane_(take(packer)) {}
  // An error on the way out must not leave kernels that still write somewhere.
  ~Lease() {
    if (!finished_ && !lane_->stuck()) {
      try {
        lane_->finish(!writes_);
      } catch (const Error&) {
        lane_->abandon();  // nobody knows whether something still runs there: see give_back()
      }
    }
    give_back();
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  GpuLane* operator->() const { return lane_; }
  GpuLane& operator*() const { return *lane_; }
  void finish() {
    finished_ = false;
    lane_->finish(!writes_);
    finished_ = true;
  }

 private:
  static GpuLane* take(GpuPacker& packer) {
    std::unique_lock lock(packer.mutex_);
    // Who holds one gives it back within the limit, or gives the device up.
    packer.freed_->wait(lock, [&] { return packer.given_up_ || !packer.free_.empty(); });
    if (packer.given_up_) packer.refuse();
    GpuLane* lane = packer.free_.back();
    packer.free_.pop_back();
    return lane;
  }
  void give_back() {
    const std::lock_guard lock(packer_.mutex_);
    if (lane_->stuck()) {
      packer_.given_up_ = true;
      packer_.freed_->notify_all();
      return;
    }
    packer_.free_.push_back(lane_);
    packer_.freed_->notify_one();
  }

  GpuPacker& packer_;
  const CurrentDevice current_;
  const bool writes_;
  GpuLane* const lane_;
  bool finished_ = false;
};

void GpuPacker::refuse() const {
  throw Error(StatusCode::kNoResources,
              "device " + std::to_string(device_) + " of " + runtime_.name() +
                  " was given up, because it did not finish a chunk in time: restart the process");
}

void GpuPacker::check_going() const {
  if (given_up()) refuse();
}

GpuPacker::GpuPacker(GpuRuntime& runtime, int device, std::span<const CodeObject> code,
                     size_t slot_bytes, size_t lanes, Duration limit)
    : runtime_(runtime), device_(device), slot_bytes_(up16(slot_bytes)) {
  const CurrentDevice current(runtime, device);
  load(code);
  try {
    for (size_t i = 0; i < lanes; ++i) {
      lanes_.push_back(std::make_unique<GpuLane>(runtime, slot_bytes_, limit, hurried_));
      free_.push_back(lanes_.back().get());
    }
  } catch (...) {
    lanes_.clear();
    runtime.unload_module(module_);
    throw;
  }
}

GpuPacker::~GpuPacker() {
  // Freeing anything would wait for the device; and in a forked child there is none.
  if (given_up_ || generation_ != fork_generation()) {
    for (auto& lane : lanes_) static_cast<void>(lane.release());
    return;
  }
  try {
    const CurrentDevice current(runtime_, device_);
    lanes_.clear();
    runtime_.unload_module(module_);
  } catch (const Error&) {
    // The device is gone, and its memory with it.
  }
}

void GpuPacker::load(std::span<const CodeObject> code) {
  std::string said;
  for (const CodeObject& object : code) {
    try {
      module_ = runtime_.load_module(object.data);
      for (const std::string& name : gpu_kernel_names()) {
        functions_[name] = runtime_.find_function(module_, name.c_str());
      }
      code_ = object.owner;
      return;
    } catch (const Error& error) {
      if (module_ != nullptr) runtime_.unload_module(std::exchange(module_, nullptr));
      said += (said.empty() ? "" : "; ") + object.target + ": " + error.what();
    }
  }
  throw Error(StatusCode::kNoResources,
              "no kernels for device " + std::to_string(device_) + " of " + runtime_.name() + ": " +
                  (said.empty() ? "this build has none, for it found no compiler for them" : said));
}

void GpuPacker::check_fits(uint64_t bytes) const {
  if (bytes <= slot_bytes_) return;
  throw Error(StatusCode::kInvalid, "a chunk of " + std::to_string(bytes) +
                                        " bytes does not fit into " + std::to_string(slot_bytes_));
}

Digest GpuPacker::pack(const CopyPlan& plan, uint64_t begin, uint64_t end, std::byte* wire,
                       uint64_t seed, bool with_digest, WireIn in) {
  return move(Way::kPack, plan, begin, end, wire, seed, with_digest, in);
}

Digest GpuPacker::unpack(const CopyPlan& plan, uint64_t begin, uint64_t end, const std::byte* wire,
                         uint64_t seed, bool with_digest, WireIn in) {
  return move(Way::kUnpack, plan, begin, end, const_cast<std::byte*>(wire), seed, with_digest, in);
}

Digest GpuPacker::digest(const CopyPlan& plan, uint64_t begin, uint64_t end, uint64_t seed) {
  return move(Way::kDigest, plan, begin, end, nullptr, seed, true, WireIn::kHost);
}

Digest GpuPacker::move(Way way, const CopyPlan& plan, uint64_t begin, uint64_t end, std::byte* wire,
                       uint64_t seed, bool with_digest, WireIn in) {
  const uint64_t bytes = end - begin;
  check_fits(bytes);
  const gpu::RawTable table(plan, begin, end);
  const uint32_t width = table.width(begin, end);
  const char* verb = way == Way::kPack     ? "kvxfer_pack_raw"
                     : way == Way::kUnpack ? "kvxfer_unpack_raw"
                                           : "kvxfer_digest_raw";
  const std::string name = verb + std::to_string(width) + (with_digest ? "" : "_no_digest");

  // In a GPU's memory the kernel works on the bytes where they are. Who unpacks them may have them
  // changed by the peer meanwhile: what is digested is what was loaded, once, and goes to the
  // cache.
  const bool here = in == WireIn::kHost;
  Lease lane(*this, /*writes=*/way == Way::kUnpack || !here);
  const GpuRuntime::Function kernel = functions_.at(name);
  constexpr size_t kDigestBytes = gpu::kDigestWords * sizeof(uint64_t);
  lane->begin_tables(room(table.pieces()) + up16(sizeof(RawChunk)) + up16(kDigestBytes));
  const uint64_t pieces = lane->add_table(std::span(table.pieces()));
  const uint64_t place = here ? lane->slot() : reinterpret_cast<uintptr_t>(wire);
  const std::array<RawChunk, 1> chunk = {table.chunk(begin, end, place, pieces)};
  uint64_t chunks = lane->add_table(std::span<const RawChunk>(chunk));
  uint64_t digests = lane->add_zeros(kDigestBytes);
  uint32_t units = kUnits;
  lane->upload_tables();
  void* slot = reinterpret_cast<void*>(lane->slot());
  if (way == Way::kUnpack && here) {
    std::memcpy(lane->host_slot(), wire, bytes);
    runtime_.copy(slot, lane->host_slot(), bytes, lane->stream());
  }
  std::array<void*, 3> arguments = {&chunks, &digests, &units};
  check_going();
  runtime_.launch(kernel, gpu::raw_groups(chunk[0].bytes, kUnits), 1, kThreads, arguments.data(),
                  lane->stream());
  if (way == Way::kPack && here) {
    runtime_.copy(lane->host_slot(), slot, bytes, lane->stream());
  }
  lane->download(digests, kDigestBytes);
  lane.finish();
  if (way == Way::kPack && here) std::memcpy(wire, lane->host_slot(), bytes);
  if (!with_digest) return Digest{};
  return gpu::finish_words(lane->read<uint64_t>(digests), bytes, seed);
}

namespace {

// The tables of one chunk of panels on a lane, and the launches of its kernels.
class PanelLauncher {
 public:
  PanelLauncher(const PanelPlan& plan, uint32_t begin, uint32_t end, bool packs, GpuLane& lane,
                uint64_t bytes)
      : table_(plan), packs_(packs) {
    const size_t rows = table_.rows(begin, end);
    const size_t panels = end - begin;
    table_.add_codes(begin, end);
    // An order has at least one panel.
    lane.begin_tables(up16(rows) + up16(sizeof(gpu::PanelChunk)) + up16(sizeof(PanelState)) +
                      room(table_.views()) + room(table_.kinds()) + room(table_.codes()) +
                      room(table_.blocks()) + room(table_.header()) +
                      panels * (sizeof(gpu::PanelEntry) + 16));
    table_.add_chunk(begin, end, lane.slot(), lane.add_zeros(rows), bytes);
    launch_ = table_.launch();
    states_ = lane.add_zeros(sizeof(PanelState));
    launch_.states = place<PanelState>(states_);
    launch_.entries = add(lane, table_.entries());
    launch_.views = add(lane, table_.views());
    launch_.kinds = add(lane, table_.kinds());
    launch_.codes = add(lane, table_.codes());
    launch_.blocks = add(lane, table_.blocks());
    launch_.chunks = add(lane, table_.chunks());
    launch_.header = reinterpret_cast<const unsigned char*>(add(lane, table_.header()));
    launch_.per_group = kPanelsPerGroup;
    for (const auto& [name, order] : table_.orders(packs)) places_.push_back(add(lane, order));
  }

  // Bytes of the chunk if no row goes raw.
  uint64_t least_bytes() const { return table_.chunks().front().panels_end; }
  uint64_t states() const { return states_; }
  const PanelLaunch& launch() const { return launch_; }

  // Calls launch(name, groups, arguments) for each kernel that works on panels.
  template <class Launch>
  void for_each_order(Launch launch) const {
    size_t i = 0;
    for (const auto& [name, order] : table_.orders(packs_)) {
      PanelLaunch with = launch_;
      with.order = places_[i++];
      with.count = static_cast<uint32_t>(order.size());
      launch(name, (with.count + kPanelsPerGroup - 1) / kPanelsPerGroup, with);
    }
  }

 private:
  template <class T>
  static T* place(uint64_t address) {
    return reinterpret_cast<T*>(address);
  }
  template <class T>
  static const T* add(GpuLane& lane, const std::vector<T>& values) {
    return place<const T>(lane.add_table(std::span(values)));
  }

  GpuPanelTable table_;
  const bool packs_;
  PanelLaunch launch_ = {};
  uint64_t states_ = 0;
  std::vector<const uint32_t*> places_;
};

}  // namespace

void GpuPacker::launch_panels(const std::string& name, uint32_t groups, PanelLaunch launch,
                              GpuRuntime::Stream stream) {
  std::array<void*, 1> arguments = {&launch};
  check_going();
  runtime_.launch(functions_.at(name), groups, 1, kThreads, arguments.data(), stream);
}

CodedChunk GpuPacker::pack_panels(const PanelPlan& plan, uint32_t begin, uint32_t end,
                                  std::byte* wire, uint64_t seed, WireIn in) {
  check_fits(plan.most_bytes(begin, end));
  // Encoded in this GPU's memory first, wherever they go: kernels read some of what they write.
  const bool here = in == WireIn::kHost;
  Lease lane(*this, /*writes=*/!here);
  std::byte* const out = here ? lane->host_slot() : wire;
  const GpuRuntime::Stream stream = lane->stream();
  const PanelLauncher panels(plan, begin, end, true, *lane, 0);
  lane->upload_tables();
  panels.for_each_order([&](const std::string& name, uint32_t groups, const PanelLaunch& launch) {
    launch_panels(name, groups, launch, stream);
  });
  launch_panels("kvxfer_finish_chunks", 1, panels.launch(), stream);
  const uint64_t least = panels.least_bytes();
  const auto* slot = reinterpret_cast<const std::byte*>(lane->slot());
  check_going();
  runtime_.copy(out, slot, least, stream);
  lane->download(panels.states(), sizeof(PanelState));
  lane.finish();
  const PanelState& state = *lane->read<PanelState>(panels.states());
  if (state.bytes > least) {
    check_fits(state.bytes);
    check_going();
    runtime_.copy(out + least, slot + least, state.bytes - least, stream);
    lane.finish();
  }
  if (here) std::memcpy(wire, out, state.bytes);
  return {state.bytes, state.exceptions, gpu::finish_words(state.digest, state.bytes, seed)};
}

DecodedChunk GpuPacker::unpack_panels(const PanelPlan& plan, uint32_t begin, uint32_t end,
                                      const std::byte* wire, uint64_t bytes, uint64_t seed,
                                      WireIn in) {
  check_fits(bytes);
  Lease lane(*this, /*writes=*/true);
  const GpuRuntime::Stream stream = lane->stream();
  const PanelLauncher panels(plan, begin, end, false, *lane, bytes);
  lane->upload_tables();
  // A copy of our own: whatever the peer does to `wire` from now on changes nothing.
  const std::byte* from = wire;
  if (in == WireIn::kHost)
    from = static_cast<std::byte*>(std::memcpy(lane->host_slot(), wire, bytes));
  runtime_.copy(reinterpret_cast<void*>(lane->slot()), from, bytes, stream);
  launch_panels("kvxfer_check_chunks", 1, panels.launch(), stream);
  panels.for_each_order([&](const std::string& name, uint32_t groups, const PanelLaunch& launch) {
    launch_panels(name, groups, launch, stream);
  });
  launch_panels("kvxfer_put_raw_rows", 1, panels.launch(), stream);
  lane->download(panels.states(), sizeof(PanelState));
  lane.finish();
  const PanelState& state = *lane->read<PanelState>(panels.states());
  if (state.refused != 0) {
    throw Error(StatusCode::kProtocol, "a coded chunk of " + std::to_string(bytes) +
                                           " bytes has another header or other rows than panels [" +
                                           std::to_string(begin) + ", " + std::to_string(end) +
                                           ") of this fetch");
  }
  return {gpu::finish_words(state.digest, state.bytes, seed),
          {state.clamped, state.inexact},
          state.exceptions};
}

void GpuPacker::read(std::byte* to, const std::byte* from, uint64_t bytes) {
  check_fits(bytes);
  Lease lane(*this, /*writes=*/false);
  runtime_.copy(lane->host_slot(), from, bytes, lane->stream());
  lane.finish();
  std::memcpy(to, lane->host_slot(), bytes);
}

void GpuPacker::write(std::byte* to, const std::byte* from, uint64_t bytes) {
  check_fits(bytes);
  Lease lane(*this, /*writes=*/true);
  std::memcpy(lane->host_slot(), from, bytes);
  runtime_.copy(to, lane->host_slot(), bytes, lane->stream());
  lane.finish();
}

void GpuPacker::give_up() {
  const std::lock_guard lock(mutex_);
  given_up_ = true;
  freed_->notify_all();
}

bool GpuPacker::given_up() const {
  const std::lock_guard lock(mutex_);
  return given_up_;
}

void GpuPacker::zero(std::span<const Run> runs) {
  Lease lane(*this, /*writes=*/true);
  for (const Run& run : runs) {
    const uint64_t address = reinterpret_cast<uintptr_t>(run.address);
    check_going();
    if (run.count == 1) {
      runtime_.set(address, 0, run.bytes, lane->stream());
    } else if (run.stride >= static_cast<int64_t>(run.bytes)) {
      runtime_.set_rows(address, static_cast<size_t>(run.stride), 0, run.bytes, run.count,
                        lane->stream());
    } else {
      for (uint64_t i = 0; i < run.count; ++i) {
        check_going();
        runtime_.set(address + static_cast<uint64_t>(static_cast<int64_t>(i) * run.stride), 0,
                     run.bytes, lane->stream());
      }
    }
  }
  lane.finish();
}

}  // namespace kvxfer
