#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <filesystem>
#include <thread>
#include <vector>

#include "device/gpu_event.h"
#include "device/gpu_peer_memory.h"
#include "engine/gpu_gate.h"
#include "gpu/aligned_bytes.h"
#include "gpu/fake_library.h"
#include "gpu/random_panels.h"
#include "kvxfer/pack.h"
#include "kvxfer/status.h"
#include "pack/gpu_lane.h"
#include "pack/gpu_packer.h"
#include "pack/kernel_names.h"

namespace kvxfer::gpu {
namespace {

constexpr size_t kSlot = 1 << 20;
constexpr Duration kLimit = std::chrono::seconds(60);

void wait_for(GpuRuntime& runtime, GpuRuntime::Event event) {
  while (!runtime.happened(event)) std::this_thread::sleep_for(std::chrono::microseconds(20));
}

// A cache on device 1, filled as `host` is.
class DeviceCache {
 public:
  DeviceCache(GpuRuntime& runtime, const AlignedBytes& host) : runtime_(runtime) {
    const CurrentDevice current(runtime, 1);
    bytes_.emplace(runtime, GpuBytes::Where::kDevice, host.size());
    move(bytes_->data(), host.data(), host.size());
  }
  ~DeviceCache() {
    const CurrentDevice current(runtime_, 1);
    bytes_.reset();
  }
  DeviceCache(const DeviceCache&) = delete;
  DeviceCache& operator=(const DeviceCache&) = delete;

  std::byte* data() const { return bytes_->data(); }
  AlignedBytes read() const {
    const CurrentDevice current(runtime_, 1);
    AlignedBytes host(bytes_->size());
    move(host.data(), bytes_->data(), host.size());
    return host;
  }

 private:
  void move(void* to, const void* from, size_t bytes) const {
    const auto stream = runtime_.create_stream();
    const auto event = runtime_.create_event();
    runtime_.copy(to, from, bytes, stream);
    runtime_.record(event, stream);
    wait_for(runtime_, event);
    runtime_.destroy_event(event);
    runtime_.destroy_stream(stream);
  }

  GpuRuntime& runtime_;
  std::optional<GpuBytes> bytes_;
};

struct Rig {
  FakeLibrary library;
  GpuSearch search;
  size_t before = 0;
  std::array<CodeObject, 1> code = {FakeLibrary::code()};

  explicit Rig(GpuVendor vendor) : search(load_gpu_runtime(vendor)) {
    REQUIRE_MESSAGE(search.runtime, search.why_not);
    before = library.open_handles();
  }
  ~Rig() { CHECK(library.open_handles() == before); }
  GpuRuntime& runtime() const { return *search.runtime; }
};

constexpr std::array<GpuVendor, 2> kVendors = {GpuVendor::kNvidia, GpuVendor::kAmd};

TEST_CASE("gpu packer: raw chunks are the host's, on either runtime, from several threads") {
  for (const GpuVendor vendor : kVendors) {
    const Rig rig(vendor);
    CAPTURE(rig.runtime().name());
    GpuPacker packer(rig.runtime(), 1, rig.code, kSlot, 2, kLimit);
    for (uint32_t seed = 100; seed < 104; ++seed) {
      CAPTURE(seed);
      Random random(seed);
      const CacheShape shape = random_shape(random);
      const Request request = random_request(random, shape);
      AlignedBytes memory(shape.bytes());
      fill_random(random, memory.data(), memory.size());
      AlignedBytes poison(shape.bytes(), 0x5a), reference(shape.bytes(), 0x5a);
      const DeviceCache from(rig.runtime(), memory), to(rig.runtime(), poison);
      const CopyPlan host = request.plan(shape.layout(memory.data()));
      const CopyPlan host_to = request.plan(shape.layout(reference.data()));
      const CopyPlan device = request.plan(shape.layout(from.data()));
      const CopyPlan device_to = request.plan(shape.layout(to.data()));
      const auto cuts = cut_chunks(host, between(random, 3000, 60000));
      std::atomic<size_t> next = 0;
      std::atomic<int> wrong = 0;
      const auto work = [&] {
        for (size_t i; (i = next++) + 1 < cuts.size();) {
          const size_t bytes = cuts[i + 1] - cuts[i];
          AlignedBytes wire(bytes), expected(bytes);
          const bool digest = i % 3 != 0;
          const Digest said = packer.pack(device, cuts[i], cuts[i + 1], wire.data(), seed, digest);
          if (said != pack(host, cuts[i], cuts[i + 1], expected.data(), seed, digest)) ++wrong;
          if (!(wire == expected)) ++wrong;
          if (packer.unpack(device_to, cuts[i], cuts[i + 1], wire.data(), seed, digest) != said) {
            ++wrong;
          }
        }
      };
      std::vector<std::thread> threads;
      for (int i = 0; i < 3; ++i) threads.emplace_back(work);
      for (std::thread& thread : threads) thread.join();
      for (size_t i = 0; i + 1 < cuts.size(); ++i) {
        AlignedBytes wire(cuts[i + 1] - cuts[i]);
        pack(host, cuts[i], cuts[i + 1], wire.data(), seed);
        unpack(host_to, cuts[i], cuts[i + 1], wire.data(), seed);
      }
      CHECK(wrong == 0);
      CHECK(to.read() == reference);
      std::vector<Run> tail;
      device_to.append_tail_runs(tail);
      packer.zero(tail);
      zero_tail(host_to);
      CHECK(to.read() == reference);
    }
  }
}

TEST_CASE("gpu packer: coded chunks are the host's, on either runtime") {
  uint32_t exceptions = 0;
  for (const GpuVendor vendor : kVendors) {
    const Rig rig(vendor);
    GpuPacker packer(rig.runtime(), 1, rig.code, 4 << 20, 1, kLimit);
    for (uint32_t seed = 0; seed < 8; ++seed) {
      CAPTURE(seed);
      Random random(seed + 500);
      CacheShape shape = random_number_shape(random);
      shape.layers = 1;
      shape.blocks = between(random, 1, 4);
      CacheShape target = shape;
      const bool float8 = seed % 4 == 3;  // which become bfloat16
      if (float8) shape.element = ElementType::kFloat8E4M3FN;
      if (float8) target.element = ElementType::kBFloat16;
      const Request request = random_request(random, shape);
      PanelFormat format = random_format(random, shape, request);
      if (float8) format.encodings.assign(shape.contents.size(), Encoding{});
      AlignedBytes memory(shape.bytes());
      fill_numbers(random, shape.element, memory.data(), memory.size(),
                   one_of(random, {0u, 60000u}));
      AlignedBytes poison(target.bytes(), 0x5a), reference(target.bytes(), 0x5a);
      const DeviceCache from(rig.runtime(), memory), to(rig.runtime(), poison);
      const auto plan = [&](const CacheShape& side, std::byte* data) {
        return PanelPlan(side.layout(data), request.table, request.slice, request.plane_of, format);
      };
      const PanelPlan host = plan(shape, memory.data()), host_to = plan(target, reference.data());
      const PanelPlan device = plan(shape, from.data()), device_to = plan(target, to.data());
      const auto cuts = cut_panels(random, host.num_panels(), between(random, 1, 4));
      for (size_t i = 0; i + 1 < cuts.size(); ++i) {
        const uint64_t most = host.most_bytes(cuts[i], cuts[i + 1]);
        AlignedBytes wire(most), expected(most);
        const CodedChunk chunk =
            packer.pack_panels(device, cuts[i], cuts[i + 1], wire.data(), seed);
        const CodedChunk said = pack_panels(host, cuts[i], cuts[i + 1], expected.data(), seed);
        CHECK(chunk.bytes == said.bytes);
        CHECK(chunk.exceptions == said.exceptions);
        CHECK(chunk.digest == said.digest);
        CHECK(wire == expected);
        exceptions += said.exceptions;
        const DecodedChunk decoded =
            packer.unpack_panels(device_to, cuts[i], cuts[i + 1], wire.data(), chunk.bytes, seed);
        CHECK(decoded.digest == said.digest);
        unpack_panels(host_to, cuts[i], cuts[i + 1], expected.data(), said.bytes, seed);
      }
      CHECK(to.read() == reference);
    }
  }
  CHECK(exceptions > 0);
}

TEST_CASE("gpu packer: what fails is named, costs nothing, and the next call works") {
  for (const GpuVendor vendor : kVendors) {
    const Rig rig(vendor);
    CacheShape shape;
    shape.contents = {128};
    Random random(1);
    const Request request = random_request(random, shape);
    AlignedBytes memory(shape.bytes());
    fill_random(random, memory.data(), memory.size());
    const DeviceCache cache(rig.runtime(), memory);
    const CopyPlan plan = request.plan(shape.layout(cache.data()));
    AlignedBytes wire(plan.wire_bytes());
    const bool cuda = vendor == GpuVendor::kNvidia;
    const char* const allocation = cuda ? "cuMemAlloc" : "hipMalloc";
    for (unsigned nth = 0; nth < 4; ++nth) {
      rig.library.fail(allocation, nth);
      CHECK_THROWS_WITH_AS(GpuPacker(rig.runtime(), 1, rig.code, kSlot, 2, kLimit),
                           doctest::Contains("out of memory"), Error);
    }
    GpuPacker packer(rig.runtime(), 1, rig.code, kSlot, 1, kLimit);
    const auto calls = cuda ? std::vector<const char*>{"cuMemcpyAsync", "cuLaunchKernel",
                                                       "cuEventRecord", "cuEventQuery"}
                            : std::vector<const char*>{"hipMemcpyAsync", "hipModuleLaunchKernel",
                                                       "hipEventRecord", "hipEventQuery"};
    for (const char* call : calls) {
      CAPTURE(call);
      rig.library.fail(call);
      CHECK_THROWS_AS(packer.pack(plan, 0, plan.wire_bytes(), wire.data(), 1, true), Error);
      AlignedBytes expected(plan.wire_bytes());
      const CopyPlan host = request.plan(shape.layout(memory.data()));
      const Digest digest = pack(host, 0, plan.wire_bytes(), expected.data(), 1);
      CHECK(packer.pack(plan, 0, plan.wire_bytes(), wire.data(), 1, true) == digest);
      CHECK(wire == expected);
    }
    CHECK_THROWS_AS(packer.pack(plan, 0, kSlot + 64, wire.data(), 1, true), Error);
    const std::array<CodeObject, 1> other = {CodeObject{"gfx000", "code of another device", {}}};
    CHECK_THROWS_WITH_AS(GpuPacker(rig.runtime(), 1, other, kSlot, 1, kLimit),
                         doctest::Contains("gfx000"), Error);
    CHECK_THROWS_WITH_AS(GpuPacker(rig.runtime(), 1, {}, kSlot, 1, kLimit),
                         doctest::Contains("no compiler"), Error);
    const char* const lookup = cuda ? "cuModuleGetFunction" : "hipModuleGetFunction";
    rig.library.fail(lookup, static_cast<unsigned>(gpu_kernel_names().size()) - 1);
    CHECK_THROWS_WITH_AS(GpuPacker(rig.runtime(), 1, rig.code, kSlot, 1, kLimit),
                         doctest::Contains(lookup), Error);
  }
}

TEST_CASE("gpu packer: code stays as long as a kernel may be loaded from it") {
  const Rig rig(GpuVendor::kNvidia);
  auto owner = std::make_shared<const std::string>("fake code");
  const std::weak_ptr<const std::string> watched = owner;
  auto code = std::vector{CodeObject{"fake", owner->data(), owner}};
  auto packer = std::make_unique<GpuPacker>(rig.runtime(), 1, code, kSlot, 1, kLimit);
  owner.reset();
  code.clear();
  CHECK(!watched.expired());
  packer.reset();
  CHECK(watched.expired());
}

TEST_CASE(
    "gpu packer: who hurries gives up what reads the cache, and waits for what writes there") {
  Rig rig(GpuVendor::kNvidia);
  CacheShape shape;
  shape.contents = {128};
  Random random(1);
  const Request request = random_request(random, shape);
  AlignedBytes memory(shape.bytes());
  fill_random(random, memory.data(), memory.size());
  const DeviceCache from(rig.runtime(), memory), to(rig.runtime(), AlignedBytes(shape.bytes()));
  const CopyPlan plan = request.plan(shape.layout(from.data()));
  const CopyPlan target = request.plan(shape.layout(to.data()));
  const uint64_t bytes = plan.wire_bytes();
  AlignedBytes wire(bytes), late(bytes);
  // Never destroyed: what a device that was given up may still use is left to it.
  static auto* packer = new GpuPacker(rig.runtime(), 1, rig.code, kSlot, 2, kLimit);
  rig.before += 2 * 6 + 1;
  const Digest digest = packer->pack(plan, 0, bytes, wire.data(), 1, true);
  rig.library.hold(true);
  std::atomic<bool> unpacked = false;
  std::thread writes([&] {
    CHECK(packer->unpack(target, 0, bytes, wire.data(), 1, true) == digest);
    unpacked = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // it has its lane
  packer->hurry();
  CHECK_THROWS_WITH_AS(packer->pack(plan, 0, bytes, late.data(), 1, true),
                       doctest::Contains("or a second of the end"), Error);
  CHECK(!unpacked);
  rig.library.hold(false);
  writes.join();
  CHECK(unpacked);
}

TEST_CASE("gpu packer: a lane that found no memory for larger tables keeps those it has") {
  for (const GpuVendor vendor : kVendors) {
    const Rig rig(vendor);
    const CurrentDevice current(rig.runtime(), 1);
    const std::atomic<bool> hurried = false;
    GpuLane lane(rig.runtime(), kSlot, kLimit, hurried);
    const bool cuda = vendor == GpuVendor::kNvidia;
    for (const char* call :
         {cuda ? "cuMemAlloc" : "hipMalloc", cuda ? "cuMemHostAlloc" : "hipHostMalloc"}) {
      CAPTURE(call);
      const size_t before = rig.library.open_handles();
      rig.library.fail(call);
      CHECK_THROWS_WITH_AS(lane.begin_tables(1 << 20), doctest::Contains("out of memory"), Error);
      CHECK(rig.library.open_handles() == before);
      lane.begin_tables(64 << 10);
      const uint64_t zeros = lane.add_zeros(64 << 10);
      lane.upload_tables();
      lane.download(zeros, 64 << 10);
      lane.finish();
      CHECK(*lane.read<uint64_t>(zeros) == 0);
    }
  }
}

TEST_CASE("gpu packer: tables that are outgrown are not freed, which would wait for the device") {
  for (const GpuVendor vendor : kVendors) {
    const Rig rig(vendor);
    const CurrentDevice current(rig.runtime(), 1);
    const std::atomic<bool> hurried = false;
    GpuLane lane(rig.runtime(), kSlot, kLimit, hurried);
    const size_t before = rig.library.open_handles();
    for (size_t bytes = 100 << 10; bytes < 2 << 20; bytes *= 3) {
      lane.begin_tables(bytes);
      const std::vector<uint32_t> values(bytes / 4, 7);
      const uint64_t at = lane.add_table(std::span(values));
      lane.upload_tables();
      lane.download(at, bytes);
      lane.finish();
      CHECK(std::equal(values.begin(), values.end(), lane.read<uint32_t>(at)));
    }
    CHECK(rig.library.open_handles() == before + 3 * 2);
  }
}

TEST_CASE("gpu packer: a graph that is captured meanwhile is not disturbed") {
  for (const GpuVendor vendor : kVendors) {
    const Rig rig(vendor);
    GpuRuntime& runtime = rig.runtime();
    const CurrentDevice current(runtime, 1);
    const auto stream = runtime.create_stream(), captured = runtime.create_stream();
    CacheShape shape;
    shape.contents = {128};
    Random random(1);
    const Request request = random_request(random, shape);
    AlignedBytes memory(shape.bytes());
    fill_random(random, memory.data(), memory.size());
    const DeviceCache cache(runtime, memory);
    const CopyPlan plan = request.plan(shape.layout(cache.data()));
    const uint64_t bytes = plan.wire_bytes();
    AlignedBytes wire(bytes), expected(bytes);
    pack(request.plan(shape.layout(memory.data())), 0, bytes, expected.data(), 1);
    const auto work = [&] {
      GpuPacker packer(runtime, 1, rig.code, kSlot, 1, kLimit);
      packer.pack(plan, 0, bytes, wire.data(), 1, true);
      const GpuEvent event(rig.search.runtime, 1, stream);
      while (!event.happened()) std::this_thread::sleep_for(std::chrono::microseconds(20));
    };
    // The thread that captures is relaxed by `current`; the other finds the mode that threads have.
    rig.library.begin_capture(vendor, captured);
    std::thread(work).join();
    CHECK_THROWS_WITH_AS(GpuEvent(rig.search.runtime, 1, captured),
                         doctest::Contains("captured into a graph"), Error);
    work();
    CHECK(rig.library.end_capture(vendor, captured));
    CHECK(wire == expected);

    const auto event = runtime.create_event();
    rig.library.begin_capture(vendor, captured);
    std::thread([&] {
      // As the packer's threads did before: the rig notices.
      CHECK_THROWS_AS(runtime.happened(event), Error);
    }).join();
    CHECK(!rig.library.end_capture(vendor, captured));
    runtime.destroy_event(event);
    runtime.destroy_stream(stream);
    runtime.destroy_stream(captured);
  }
}

// Whether `work` ends in a forked child.
template <class Work>
bool ends_in_child(Work work) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(10);
    work();
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST_CASE("gpu packer: a forked child destroys what its parent's threads wait for") {
  const Rig rig(GpuVendor::kNvidia);
  CacheShape shape;
  shape.contents = {128};
  Random random(1);
  const Request request = random_request(random, shape);
  const AlignedBytes memory(shape.bytes());
  const DeviceCache cache(rig.runtime(), memory);
  const CopyPlan plan = request.plan(shape.layout(cache.data()));
  auto packer = std::make_unique<GpuPacker>(rig.runtime(), 1, rig.code, kSlot, 1, kLimit);
  rig.library.hold(true);
  std::atomic<int> begun = 0;
  const auto work = [&] {
    AlignedBytes wire(plan.wire_bytes());
    ++begun;
    packer->pack(plan, 0, plan.wire_bytes(), wire.data(), 1, true);
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) threads.emplace_back(work);
  while (begun < 3) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // two of them wait for the lane
  CHECK(ends_in_child([&] { packer.reset(); }));
  rig.library.hold(false);
  for (std::thread& thread : threads) thread.join();

  auto gate = std::make_unique<GpuGate>();
  gate->start();
  std::atomic<bool> opened = false;
  const auto event = std::make_shared<GpuEvent>(rig.search.runtime, 1, nullptr);
  gate->wait(event, Clock::now() + kLimit, [&](const std::string& failure) {
    CHECK(failure.empty());
    opened = true;
  });
  while (!opened) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // its thread waits for more to do
  CHECK(ends_in_child([&] { gate.reset(); }));
}

TEST_CASE(
    "gpu runtime: memory is found with its device and allocation, dmabufs with their offset") {
  const auto open_files = [] {
    size_t count = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
      count += entry.exists() || true;
    }
    return count;
  };
  for (const GpuVendor vendor : kVendors) {
    const Rig rig(vendor);
    GpuRuntime& runtime = rig.runtime();
    CHECK(runtime.device_count() == 2);
    CHECK(runtime.pci_address(1) ==
          (vendor == GpuVendor::kNvidia ? "0000:3c:00.0" : "0000:c2:00.0"));
    int local = 0;
    CHECK(!runtime.find_memory(&local));
    const size_t files = open_files();
    {
      const CurrentDevice current(runtime, 1);
      const GpuBytes bytes(runtime, GpuBytes::Where::kDevice, 100000);
      const auto memory = runtime.find_memory(bytes.data() + 5000);
      REQUIRE(memory);
      CHECK(memory->kind == GpuMemory::Kind::kDevice);
      CHECK(memory->device == 1);
      CHECK(memory->base == bytes.address());
      CHECK(memory->bytes == 100000);
      const DmaBuf buffer = runtime.export_dmabuf(bytes.address() + 5000, 1000);
      CHECK(buffer.fd.get() >= 0);
      // CUDA exports the pages that are asked for, HIP all that is behind them.
      const auto begins = static_cast<uint64_t>(::lseek(buffer.fd.get(), 0, SEEK_CUR));
      CHECK((begins > 0) == (vendor == GpuVendor::kNvidia));
      CHECK(begins + buffer.offset == (vendor == GpuVendor::kNvidia ? 0 : 2 << 20) + 512 + 5000);
      CHECK_THROWS_AS(runtime.export_dmabuf(bytes.address() + 5000, 100000), Error);
      CHECK_THROWS_AS(runtime.export_dmabuf(bytes.address() + 5000, SIZE_MAX - 4000), Error);
      CHECK_THROWS_AS(runtime.export_dmabuf(reinterpret_cast<uintptr_t>(&local), 4), Error);
    }
    CHECK(open_files() == files);
  }
  ::setenv("FAKE_HIP_VERSION", "50731921", 1);
  {
    const Rig rig(GpuVendor::kAmd);  // counts memory types from 0
    const CurrentDevice current(rig.runtime(), 0);
    const GpuBytes device(rig.runtime(), GpuBytes::Where::kDevice, 64);
    const GpuBytes pinned(rig.runtime(), GpuBytes::Where::kHost, 64);
    CHECK(rig.runtime().find_memory(device.data())->kind == GpuMemory::Kind::kDevice);
    CHECK(rig.runtime().find_memory(pinned.data())->kind == GpuMemory::Kind::kHost);
  }
  ::unsetenv("FAKE_HIP_VERSION");
}

TEST_CASE("gpu runtime: without a library or a device there is a reason") {
  const FakeLibrary library;
  ::setenv("KVXFER_CUDA_LIBRARY", "libno-such-thing.so", 1);
  const GpuSearch missing = load_gpu_runtime(GpuVendor::kNvidia);
  CHECK(!missing.runtime);
  CHECK(missing.why_not.find("libno-such-thing.so") != std::string::npos);
  ::setenv("KVXFER_CUDA_LIBRARY", "libm.so.6", 1);
  CHECK(load_gpu_runtime(GpuVendor::kNvidia).why_not.find("cuInit") != std::string::npos);
  ::setenv("KVXFER_CUDA_LIBRARY", KVXFER_FAKE_GPU, 1);
  library.fail("cuInit");
  CHECK(load_gpu_runtime(GpuVendor::kNvidia).why_not.find("cuInit failed") != std::string::npos);
}

// A process with memory on device 0, which ends with this object.
struct OtherProcess {
  OtherProcess(GpuVendor vendor, uint64_t bytes) {
    std::array<int, 2> answer{};
    REQUIRE(::pipe(answer.data()) == 0);
    pid = ::fork();
    if (pid == 0) {
      try {
        const auto runtime = load_gpu_runtime(vendor).runtime;
        const CurrentDevice current(*runtime, 0);
        handle = runtime->export_memory(runtime->allocate(bytes));
        static_cast<void>(!::write(answer[1], handle.data(), handle.size()));
        while (true) ::pause();
      } catch (...) {
      }
      ::_exit(1);
    }
    ::close(answer[1]);
    CHECK(::read(answer[0], handle.data(), handle.size()) == static_cast<ssize_t>(handle.size()));
    ::close(answer[0]);
  }
  ~OtherProcess() { end(); }
  void end() {
    if (pid <= 0) return;
    ::kill(pid, SIGKILL);
    ::waitpid(std::exchange(pid, 0), nullptr, 0);
  }

  pid_t pid = 0;
  GpuIpcHandle handle{};
};

TEST_CASE("gpu packer: chunks in the memory of another process are the host's") {
  for (const GpuVendor vendor : kVendors) {
    const Rig rig(vendor);
    CAPTURE(rig.runtime().name());
    GpuPacker packer(rig.runtime(), 1, rig.code, kSlot, 2, kLimit);
    OtherProcess other(vendor, 2 * kSlot);
    const auto open = [&](uint64_t bytes) {
      return GpuPeerMemory(rig.search.runtime, 1, other.handle, bytes);
    };
    // Refused the second time by the runtime, so it is asked once; and closed each time.
    CHECK_THROWS_WITH_AS(open(2 * kSlot + 1), doctest::Contains("where it said"), Error);
    for (uint32_t seed = 0; seed < 3; ++seed) {
      CAPTURE(seed);
      const GpuPeerMemory first = open(2 * kSlot), second = open(kSlot);
      REQUIRE(first.data() == second.data());
      std::byte* const wire = first.data() + kSlot / 2;
      Random random(seed + 900);
      const CacheShape shape = random_number_shape(random);
      const Request request = random_request(random, shape);
      const PanelFormat format = random_format(random, shape, request);
      AlignedBytes memory(shape.bytes());
      fill_numbers(random, shape.element, memory.data(), memory.size(), 50);
      AlignedBytes poison(shape.bytes(), 0x5a), reference(shape.bytes(), 0x5a);
      const DeviceCache from(rig.runtime(), memory), to(rig.runtime(), poison);
      const CopyPlan host = request.plan(shape.layout(memory.data()));
      const CopyPlan host_to = request.plan(shape.layout(reference.data()));
      const CopyPlan device = request.plan(shape.layout(from.data()));
      const CopyPlan device_to = request.plan(shape.layout(to.data()));
      const auto cuts = cut_chunks(host, 30000);
      for (size_t i = 0; i + 1 < cuts.size(); ++i) {
        const uint64_t begin = cuts[i], end = cuts[i + 1];
        AlignedBytes expected(end - begin), found(end - begin);
        const Digest digest = pack(host, begin, end, expected.data(), seed);
        CHECK(packer.pack(device, begin, end, wire, seed, true, WireIn::kGpu) == digest);
        packer.read(found.data(), wire, found.size());
        CHECK(found == expected);
        CHECK(packer.unpack(device_to, begin, end, wire, seed, true, WireIn::kGpu) == digest);
        unpack(host_to, begin, end, expected.data(), seed);
      }
      CHECK(to.read() == reference);
      const auto plan = [&](std::byte* data) {
        return PanelPlan(shape.layout(data), request.table, request.slice, request.plane_of,
                         format);
      };
      const PanelPlan panels = plan(memory.data());
      const uint32_t last = std::min(3u, panels.num_panels());
      AlignedBytes expected(panels.most_bytes(0, last));
      const CodedChunk said = pack_panels(panels, 0, last, expected.data(), seed);
      const CodedChunk coded =
          packer.pack_panels(plan(from.data()), 0, last, wire, seed, WireIn::kGpu);
      CHECK(coded.bytes == said.bytes);
      CHECK(coded.digest == said.digest);
      AlignedBytes found(expected.size());
      packer.read(found.data(), wire, coded.bytes);
      CHECK(found == expected);
      CHECK(packer.unpack_panels(plan(to.data()), 0, last, wire, coded.bytes, seed, WireIn::kGpu)
                .digest == said.digest);
      unpack_panels(plan(reference.data()), 0, last, expected.data(), said.bytes, seed);
      CHECK(to.read() == reference);
      *expected.data() ^= std::byte{1};
      packer.write(wire, expected.data(), 1);
      CHECK_THROWS_WITH_AS(
          packer.unpack_panels(plan(to.data()), 0, last, wire, coded.bytes, seed, WireIn::kGpu),
          doctest::Contains("another header"), Error);
    }
    const CurrentDevice current(rig.runtime(), 1);
    const GpuBytes own(rig.runtime(), GpuBytes::Where::kDevice, 64);
    const GpuIpcHandle ours = rig.runtime().export_memory(own.address());
    CHECK_THROWS_AS(GpuPeerMemory(rig.search.runtime, 1, ours, 64), Error);
    other.end();
    CHECK_THROWS_AS(open(kSlot), Error);
  }
}

TEST_CASE("gpu packer: who hurries waits for what goes into a peer's memory") {
  const Rig rig(GpuVendor::kNvidia);
  CacheShape shape;
  shape.contents = {128};
  Random random(1);
  const Request request = random_request(random, shape);
  AlignedBytes memory(shape.bytes());
  const DeviceCache from(rig.runtime(), memory), peers(rig.runtime(), AlignedBytes(kSlot));
  const CopyPlan plan = request.plan(shape.layout(from.data()));
  GpuPacker packer(rig.runtime(), 1, rig.code, kSlot, 1, kLimit);
  rig.library.hold(true);
  packer.hurry();
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(1300));
    rig.library.hold(false);
  });
  CHECK_NOTHROW(packer.pack(plan, 0, plan.wire_bytes(), peers.data(), 1, true, WireIn::kGpu));
  CHECK(!packer.given_up());
  later.join();
}

}  // namespace
}  // namespace kvxfer::gpu
