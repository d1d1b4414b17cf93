// The engine where memory runs short while a peer's GPU memory is opened.

#include <doctest/doctest.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>

#include "cpp/failing_new.h"
#include "cpp/fake_link.h"
#include "gpu/fake_library.h"
#include "gpu/random_cache.h"
#include "kvxfer/agent.h"

namespace kvxfer {
namespace {

using testing::FakeLink;
using wire::MessageType;

constexpr uint32_t kSlot = 64u << 10, kSlots = 4;

wire::Layout layout_of(const CacheShape& shape) {
  wire::Layout message;
  message.cache_id = 1;
  message.element = static_cast<uint8_t>(shape.element);
  message.num_blocks = shape.blocks;
  message.block_size = shape.block_size;
  message.num_heads = shape.heads;
  message.layers = {"l0"};
  message.planes = {{"p0", shape.contents[0]}};
  const CacheLayout layout = shape.layout(nullptr);
  const PlaneView& view = layout.views[0];
  message.views = {{0, view.block_stride, view.head_stride, view.token_stride, 2}};
  return message;
}

wire::FetchGpu request(uint64_t id) {
  wire::FetchGpu message;
  wire::Fetch& fetch = message.fetch;
  fetch.fetch_id = id;
  fetch.offer_id = "request-1";
  fetch.cache_id = 1;
  fetch.layers = {0};
  fetch.head_end = 1;
  fetch.token_end = 16;
  fetch.panel_tokens = 16;
  fetch.chunk_bytes = kSlot;
  message.arena = 3;
  return message;
}

bool is_answered(FakeLink& link, uint64_t id) {
  for (int i = 0; i < 2000; ++i) {
    for (const wire::Bytes& message : link.heard()) {
      const auto body = std::span(message).subspan(1);
      if (wire::type_of(message) == MessageType::kAcceptGpu &&
          wire::AcceptGpu::decode(body).accept.fetch_id == id) {
        return true;
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return false;
}

TEST_CASE("where memory runs short while an arena is opened, later fetches are answered") {
  if (!fail_new(-1)) {
    MESSAGE("skipped: operator new is the sanitizer's");
    return;
  }
  const gpu::FakeLibrary library;
  const auto code = std::filesystem::temp_directory_path() / "kvxfer_fake_code";
  std::ofstream(code) << "fake code" << '\0';
  ::setenv("KVXFER_GPU_CODE", code.c_str(), 1);
  const auto runtime = load_gpu_runtime(GpuVendor::kNvidia).runtime;
  REQUIRE(runtime);
  const CacheShape shape{.contents = {64}};
  uint64_t memory = 0;
  {
    const CurrentDevice current(*runtime, 0);
    memory = runtime->allocate(shape.bytes());
  }
  AgentOptions options;
  options.name = "here";
  options.slot_bytes = kSlot;
  options.arena_bytes = uint64_t{kSlots} * kSlot;
  options.heartbeat_timeout = 1000;
  Agent agent(options);
  const CacheId cache =
      agent.register_cache(shape.layout(reinterpret_cast<std::byte*>(memory)), /*on_gpu=*/true);
  const Offer offer = agent.offer({"request-1", {}, cache, {{3, 1}, 0, 0}, 16, 60, 9, true});
  int dropped = 0;
  for (int n = 0; n < 120; ++n) {
    CAPTURE(n);
    const auto link = std::make_shared<FakeLink>(/*one_sided=*/false, kSlots * kSlot);
    link->gpu_problem = "";
    agent.attach(agent.add_peer("there"), link, 7, /*inbound=*/true, "test");
    link->say(
        wire::Hello{wire::kProtocolVersion, 7, "there", kSlot, 31 | wire::kGpuIpcBit}.encode());
    link->say(layout_of(shape).encode());
    wire::GpuArena arena;
    arena.arena = 3;
    arena.mailbox = kSlots * kSlot;
    arena.bytes = arena.mailbox + wire::kGpuMailboxBytes;
    link->say(arena.encode());
    const wire::Bytes first = request(1).encode(), second = request(2).encode();
    fail_new(n);
    link->say(first);
    fail_new(-1);
    if (link->closed()) {
      ++dropped;
    } else {
      link->say(second);
      CHECK(is_answered(*link, 2));
    }
    link->end();
  }
  CHECK(dropped < 120);
  agent.close();
  {
    const CurrentDevice current(*runtime, 0);
    runtime->free(memory);
  }
  std::filesystem::remove(code);
}

}  // namespace
}  // namespace kvxfer
