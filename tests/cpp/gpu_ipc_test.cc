// Memory of GPUs between processes, as a peer that says whatever a test wants would have it: what
// is agreed on, and what is refused. tests/conformance/test_gpu_ipc.py moves bytes.

#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine_pair.h"
#include "fake_link.h"
#include "wire/messages.h"

namespace kvxfer::testing {
namespace {

using wire::MessageType;

constexpr uint32_t kSlot = 64u << 10, kSlots = 4;

// An agent whose peer shares the host, or so it seems.
struct Side {
  explicit Side(bool inbound, bool on = true, const std::string& problem = "",
                uint32_t bits = wire::kGpuIpcBit, size_t mapped = kSlots * kSlot)
      : link(std::make_shared<FakeLink>(/*one_sided=*/!inbound, inbound ? mapped : 0)) {
    AgentOptions options = options_of("here", 1, kSlots);
    options.gpu_ipc = on;
    options.heartbeat_timeout = 1000;
    agent = std::make_unique<Agent>(options);
    cache = agent->register_cache(memory.layout);
    link->gpu_problem = problem;
    const PeerId peer_id = agent->add_peer("there");
    agent->attach(peer_id, link, 7, inbound, "test");
    link->say(wire::Hello{wire::kProtocolVersion, 7, "there", kSlot, 31 | bits}.encode());
    peer = peer_id;
  }
  ~Side() {
    end();
    agent->close();
  }
  void end() {
    if (!std::exchange(ended, true)) link->end();
  }

  std::vector<wire::Bytes> heard(MessageType type) {
    std::vector<wire::Bytes> found;
    for (const wire::Bytes& message : link->heard()) {
      if (wire::type_of(message) == type) found.emplace_back(message.begin() + 1, message.end());
    }
    return found;
  }
  bool dropped_for(const std::string& what) const {
    return link->closed() && link->reason.find(what) != std::string::npos;
  }

  TestCache memory{1, 8, 16, Order::kHeadMajor};
  std::unique_ptr<Agent> agent;
  CacheId cache = 0;
  std::shared_ptr<FakeLink> link;
  PeerId peer = 0;
  bool ended = false;
};

wire::GpuArena arena_of(uint32_t number) {
  wire::GpuArena arena;
  arena.arena = number;
  arena.pci = "0000:3b:00.0";
  arena.mailbox = kSlots * kSlot;
  arena.bytes = arena.mailbox + wire::kGpuMailboxBytes;
  return arena;
}

wire::FetchGpu request(uint64_t id) {
  wire::FetchGpu message;
  wire::Fetch& fetch = message.fetch;
  fetch.fetch_id = id;
  fetch.offer_id = "request-1";
  fetch.generation = generation_of(1);
  fetch.cache_id = 1;
  fetch.layers = {0};
  fetch.head_end = TestCache::kHeads;
  fetch.token_end = 64;
  fetch.panel_tokens = 64;
  fetch.chunk_bytes = kSlot;
  fetch.slots = {2};
  message.arena = 3;
  return message;
}

void announce(Side& side) {
  wire::Layout message;
  message.cache_id = 1;
  message.element = static_cast<uint8_t>(side.memory.layout.element);
  message.num_blocks = 8;
  message.block_size = 16;
  message.num_heads = TestCache::kHeads;
  message.layers = {"layer.0"};
  message.planes = {{"k", TestCache::kContent}, {"v", TestCache::kContent}};
  const int64_t row = TestCache::kContent * 2, block = row * TestCache::kHeads * 16;
  message.views = {{0, block, row * 16, row, 2}, {8u * block, block, row * 16, row, 2}};
  side.link->say(message.encode());
}

// When the FETCH has been said.
Fetch begin_fetch(Side& consumer) {
  FetchSpec spec;
  spec.offer_id = "request-1";
  spec.generation = generation_of(1);
  spec.cache = consumer.cache;
  spec.table.blocks = {3, 1, 7, 4};
  spec.num_tokens = 64;
  spec.parts = {{consumer.peer, {0}, 0, TestCache::kHeads}};
  Fetch fetch = consumer.agent->fetch(spec);
  REQUIRE(eventually([&] { return consumer.heard(MessageType::kFetch).size() == 1; }));
  return fetch;
}

TEST_SUITE("memory of GPUs between processes") {
  TEST_CASE("the bit is set where the agent allows it and the link can") {
    struct Case {
      bool on;
      std::string problem;
      bool says;
    };
    for (const Case& c : {Case{true, "", true}, Case{false, "", false}, Case{true, "no", false}}) {
      Side side(/*inbound=*/true, c.on, c.problem);
      const auto hello = wire::Hello::decode(side.heard(MessageType::kHello).at(0));
      CHECK(((hello.schemes & wire::kGpuIpcBit) != 0) == c.says);
      side.link->say(arena_of(1).encode());
      CHECK(side.link->closed() == !c.says);
    }
    Side older(/*inbound=*/true, true, "", 0);
    older.link->say(arena_of(1).encode());
    CHECK(older.dropped_for("GPU_ARENA was not agreed on"));
  }

  TEST_CASE("the link's end is told to who may have said GPU_ARENA") {
    for (const uint32_t bits : {wire::kGpuIpcBit, 0u}) {
      Side side(/*inbound=*/true, true, "", bits);
      side.end();
      side.agent->close();
      CHECK(side.link->let_go == (bits != 0 ? 1 : 0));
    }
  }

  TEST_CASE("arenas that make no sense end the link") {
    const auto refused = [](auto change) {
      Side side(/*inbound=*/true);
      side.link->say(arena_of(1).encode());
      CHECK(!side.link->closed());
      wire::GpuArena arena = arena_of(2);
      change(arena);
      side.link->say(arena.encode());
      return side.link->closed();
    };
    CHECK(!refused([](wire::GpuArena&) {}));
    CHECK(refused([](wire::GpuArena& arena) { arena.arena = 0; }));
    CHECK(refused([](wire::GpuArena& arena) { arena.arena = 1; }));
    CHECK(!refused([](wire::GpuArena& arena) { arena.bytes = UINT64_MAX; }));
    CHECK(refused([](wire::GpuArena& arena) { --arena.bytes; }));
    CHECK(refused([](wire::GpuArena& arena) { arena.bytes = 0; }));
    CHECK(refused([](wire::GpuArena& arena) { arena.mailbox -= 256; }));
    CHECK(refused([](wire::GpuArena& arena) {
      arena.mailbox += 16;
      arena.bytes += 16;
    }));
    CHECK(refused([](wire::GpuArena& arena) { arena.mailbox = UINT64_MAX - 255; }));
    Side many(/*inbound=*/true);
    for (uint32_t i = 1; i <= 64; ++i) many.link->say(arena_of(i).encode());
    CHECK(!many.link->closed());
    many.link->say(arena_of(65).encode());
    CHECK(many.dropped_for("one of too many"));
  }

  TEST_CASE("a cache of the host is served as ever, and the link's end is told") {
    Side side(/*inbound=*/true);
    side.memory.fill(1);
    announce(side);
    const Offer offer = side.agent->offer(
        {"request-1", generation_of(1), side.cache, {{3, 1, 7, 4}, 0, 0}, 64, 30, 1, true});
    side.link->say(arena_of(3).encode());
    side.link->say(request(1).encode());
    REQUIRE(eventually([&] { return side.heard(MessageType::kCommit).size() == 1; }));
    const auto answer = wire::AcceptGpu::decode(side.heard(MessageType::kAcceptGpu).at(0));
    CHECK(answer.gpu == 0);
    CHECK(answer.path_why == "the producer's cache is in the host's memory");
    const auto commit = wire::Commit::decode(side.heard(MessageType::kCommit)[0]);
    CHECK(commit.slot == 2);
    CHECK(side.link->mapped_arena()[2 * kSlot] != std::byte{0});
    CHECK(side.link->let_go == 0);
    side.end();
    CHECK(eventually([&] { return side.link->let_go == 1; }));
  }

  TEST_CASE("a slot that is not whole is in no arena, of the host's memory or a GPU's") {
    for (const size_t mapped : {kSlot - 1u, kSlot, 2 * kSlot - 1, 2 * kSlot}) {
      const uint32_t whole = static_cast<uint32_t>(mapped) / kSlot;
      for (const uint32_t slot : {0u, 1u, 2u}) {
        for (const bool credit : {false, true}) {
          CAPTURE(mapped);
          CAPTURE(slot);
          Side side(/*inbound=*/true, true, "", wire::kGpuIpcBit, mapped);
          side.memory.fill(1);
          announce(side);
          const Offer offer = side.agent->offer(
              {"request-1", generation_of(1), side.cache, {{3, 1, 7, 4}, 0, 0}, 64, 30, 1, true});
          wire::GpuArena arena = arena_of(3);
          arena.mailbox = whole * kSlot;
          arena.bytes = arena.mailbox + wire::kGpuMailboxBytes;
          side.link->say(arena.encode());
          auto message = request(1);
          message.fetch.chunk_bytes = kSlot - 256;
          message.fetch.slots = {slot};
          if (credit) message.fetch.slots.clear();
          side.link->say(message.encode());
          if (credit) side.link->say(wire::Credit{1, {slot}}.encode());
          CHECK(side.dropped_for("lies outside the arena") == (slot >= whole));
        }
      }
    }
  }

  TEST_CASE("a fetch from who is lost ends before who it was lets go of its slots") {
    Side side(/*inbound=*/false);
    const Fetch fetch = begin_fetch(side);
    side.link->lose();
    CHECK(fetch.done());
    CHECK(fetch.status().code == StatusCode::kPeerLost);
    CHECK(side.agent->stats().peers == 1);
    CHECK(side.agent->stats().quarantined_slots > 0);
    side.end();
    CHECK(side.agent->stats().peers == 0);
    CHECK(side.agent->stats().free_slots == side.agent->stats().slots);
  }

  TEST_CASE("what was not asked or agreed ends the link") {
    Side unknown(/*inbound=*/true);
    announce(unknown);
    unknown.link->say(request(1).encode());
    CHECK(unknown.dropped_for("FETCH_GPU without GPU_ARENA"));
    for (const wire::Bytes& message :
         {wire::GpuTrial{1, 0}.encode(), wire::GpuTrial{0, wire::kGpuTrials}.encode()}) {
      Side trial(/*inbound=*/false);
      trial.link->say(message);
      CHECK(trial.dropped_for("GPU_TRIAL is of no arena"));
    }
    Side tried(/*inbound=*/true);
    tried.link->say(arena_of(1).encode());
    tried.link->say(wire::GpuTried{1, 0, ""}.encode());
    CHECK(tried.dropped_for("GPU_TRIED is of no trial"));
    for (const uint32_t bits : {wire::kGpuIpcBit, 0u}) {
      Side told(/*inbound=*/false, true, "", bits);
      told.link->say(wire::encode_gpu_caches());
      CHECK(told.dropped_for("GPU_CACHES was not agreed on") == (bits == 0));
    }
    Side closed(/*inbound=*/false);
    closed.link->say(wire::encode_gpu_closed());
    CHECK(closed.link->closed());
    Side consumer(/*inbound=*/false);
    const Fetch fetch = begin_fetch(consumer);
    wire::AcceptGpu answer;
    answer.accept.fetch_id = wire::Fetch::decode(consumer.heard(MessageType::kFetch)[0]).fetch_id;
    answer.accept.order = {0, 1, 2, 3, 4};
    answer.accept.producer_block_size = 16;
    answer.gpu = 1;
    consumer.link->say(answer.encode());
    CHECK(consumer.dropped_for("ACCEPT is no answer to what was asked"));
    CHECK(fetch.status().code == StatusCode::kProtocol);
  }
}

}  // namespace
}  // namespace kvxfer::testing
