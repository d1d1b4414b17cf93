// The direct path of an agent whose peer says whatever a test wants: when blocks are given back,
// and what a peer that asks for it may say and make the agent keep.

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "fake_link.h"
#include "kvxfer/agent.h"
#include "wire/messages.h"

namespace kvxfer {
namespace {

using testing::FakeLink;
using wire::MessageType;

constexpr uint32_t kSlot = 16u << 10, kSlots = 16;
constexpr Generation kGeneration{std::byte{5}};

template <typename Condition>
bool eventually(const Condition& condition) {
  for (int i = 0; i < 5000 && !condition(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return condition();
}

// Something that takes as long as a test wants, at most some seconds.
class Gate {
 public:
  void open() {
    if (!std::exchange(opened_, true)) promise_.set_value();
  }
  // In whichever thread it is that this takes the time of.
  void pass() {
    thread = std::this_thread::get_id();
    waiting = true;
    future_.wait_for(std::chrono::seconds(20));
  }
  std::atomic<bool> waiting = false;
  std::thread::id thread;

 private:
  bool opened_ = false;
  std::promise<void> promise_;
  std::shared_future<void> future_ = promise_.get_future().share();
};

// An agent with a peer behind a link that could go direct.
struct Side {
  explicit Side(bool inbound, Path path = Path::kDirect, double heartbeat_timeout = 1e6)
      : memory(1u << 20) {
    AgentOptions options;
    options.name = "here";
    options.arena_bytes = kSlots * kSlot;
    options.slot_bytes = kSlot;
    options.peer_bytes = 1u << 20;
    options.heartbeat_interval = 0.2;
    options.heartbeat_timeout = heartbeat_timeout;
    options.digest = false;
    options.threads = 1;
    options.path = path;
    agent = std::make_unique<Agent>(options);
    layout.num_blocks = 16;
    layout.block_size = 16;
    layout.num_heads = 8;
    layout.layers = {"a"};
    layout.planes = {{"k", 64}};
    layout.views = {{memory.data(), 16 * 8 * 128, 16 * 128, 128, 2}};
    cache = agent->register_cache(layout);
    link->allows_direct = true;
    peer = agent->add_peer("there");
    agent->attach(peer, link, 7, inbound, "test");
    link->say(
        wire::Hello{wire::kProtocolVersion, 7, "there", kSlot, 31 | wire::kDirectBit}.encode());
  }
  virtual ~Side() {
    if (!ended) link->end();
    agent->close();
  }

  void end() {
    ended = true;
    link->end();
  }
  std::vector<wire::Bytes> heard(MessageType type) {
    std::vector<wire::Bytes> found;
    for (wire::Bytes& message : link->heard()) {
      if (wire::type_of(message) == type) {
        found.emplace_back(message.begin() + 1, message.end());
      }
    }
    return found;
  }

  std::vector<std::byte> memory;
  CacheLayout layout;
  std::unique_ptr<Agent> agent;
  CacheId cache = 0;
  std::shared_ptr<FakeLink> link = std::make_shared<FakeLink>(/*one_sided=*/true);
  PeerId peer = 0;
  bool ended = false;
};

struct Consumer : Side {
  explicit Consumer(Path path = Path::kDirect, double heartbeat_timeout = 1e6)
      : Side(/*inbound=*/false, path, heartbeat_timeout) {}

  Fetch fetch(double timeout = 60) {
    FetchSpec spec;
    spec.offer_id = "x";
    spec.generation = kGeneration;
    spec.cache = cache;
    spec.table.blocks = {3, 9};
    spec.num_tokens = 32;
    spec.timeout = timeout;
    spec.parts = {{peer, {0}, 0, 8}};
    return agent->fetch(spec);
  }
  // Answers what was asked with yes, and returns the slots that are granted then.
  std::vector<uint32_t> accept() {
    REQUIRE(eventually([&] { return heard(MessageType::kFetchDirect).size() == 1; }));
    const auto asked = wire::FetchDirect::decode(heard(MessageType::kFetchDirect)[0]);
    CHECK(asked.blocks == std::vector<uint32_t>{3, 9});
    CHECK(asked.fetch.slots.empty());  // nothing may be written before it is known what
    CHECK(heard(MessageType::kMemory).size() == 1);
    wire::AcceptDirect answer;
    answer.direct = 1;
    wire::Accept& accept = answer.accept;
    accept.fetch_id = id = asked.fetch.fetch_id;
    accept.order = {0, 1, 2, 3, 4};
    accept.wire_bytes = 32 * 8 * 128;
    accept.num_chunks = static_cast<uint32_t>(accept.wire_bytes / asked.fetch.chunk_bytes);
    accept.producer_block_size = 16;
    accept.element = static_cast<uint8_t>(ElementType::kBFloat16);
    link->say(answer.encode());
    const auto credits = heard(MessageType::kCredit);
    REQUIRE(credits.size() == 1);
    return wire::Credit::decode(credits[0]).slots;
  }
  void say(MessageType type) { link->say(wire::encode_fetch_id(type, id)); }

  uint64_t id = 0;
};

struct Producer : Side {
  Producer() : Side(/*inbound=*/true) { announce(*link); }

  static void announce(FakeLink& from) {
    wire::Layout message;
    message.cache_id = 1;
    message.element = static_cast<uint8_t>(ElementType::kBFloat16);
    message.num_blocks = 16;
    message.block_size = 16;
    message.num_heads = 8;
    message.layers = {"a"};
    message.planes = {{"k", 64}};
    message.views = {{0, 16 * 8 * 128, 16 * 128, 128, 2}};
    from.say(message.encode());
  }

  Offer offer(double lease = 60) {
    OfferSpec spec;
    spec.id = "x";
    spec.generation = kGeneration;
    spec.cache = cache;
    spec.table.blocks = {1, 2};
    spec.num_tokens = 32;
    spec.lease = lease;
    return agent->offer(spec);
  }
  static wire::FetchDirect request(uint64_t id) {
    wire::FetchDirect message{{}, wire::FetchDirect::kDirect, {4, 2}};
    wire::Fetch& fetch = message.fetch;
    fetch.fetch_id = id;
    fetch.offer_id = "x";
    fetch.generation = kGeneration;
    fetch.cache_id = 1;
    fetch.layers = {0};
    fetch.head_end = 8;
    fetch.token_end = 32;
    fetch.panel_tokens = 64;
    fetch.chunk_bytes = 4096;
    return message;
  }
  void open(size_t bytes = 64) { link->say(wire::Memory{1, wire::Bytes(bytes)}.encode()); }
};

TEST_SUITE("direct path of an agent") {
  TEST_CASE("a cancelled fetch is done when the producer, or its link, has let go") {
    for (const std::string how : {"CANCELLED", "REFUSED", "the end"}) {
      CAPTURE(how);
      Consumer side;
      Fetch fetch = side.fetch();
      CHECK(side.accept().size() == 2);
      std::thread canceller([&] { fetch.cancel(); });
      REQUIRE(eventually([&] { return side.heard(MessageType::kCancel).size() == 1; }));
      CHECK(fetch.status().code == StatusCode::kCancelled);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      CHECK(!fetch.done());
      CHECK(side.agent->stats().quarantined_slots == 2);
      if (how == "CANCELLED") side.say(MessageType::kCancelled);
      if (how == "REFUSED") {
        side.link->say(wire::Refused{side.id, StatusCode::kCancelled, "over"}.encode());
      }
      if (how == "the end") side.end();
      canceller.join();
      CHECK(fetch.done());
      CHECK(side.agent->stats().free_slots == kSlots);
    }
  }

  TEST_CASE("a fetch that was not accepted, or is staged, is done at once") {
    for (const Path path : {Path::kDirect, Path::kStaged}) {
      Consumer side(path);
      Fetch fetch = side.fetch();
      const auto type = path == Path::kStaged ? MessageType::kFetch : MessageType::kFetchDirect;
      REQUIRE(eventually([&] { return side.heard(type).size() == 1; }));
      fetch.cancel();
      CHECK(fetch.done());
    }
  }

  TEST_CASE("slots with chunks in the blocks need no fence") {
    Consumer side;
    Fetch fetch = side.fetch();
    const auto slots = side.accept();
    for (uint32_t chunk = 0; chunk < slots.size(); ++chunk) {
      side.link->land(wire::Commit{side.id, chunk, slots[chunk], kSlot, {}}.encode());
    }
    CHECK(fetch.wait(10));
    CHECK(fetch.status().ok());
    CHECK(fetch.report().path == "direct");
    CHECK(side.heard(MessageType::kDone).size() == 1);
    CHECK(side.agent->stats().free_slots == kSlots);
  }

  TEST_CASE("a registration that takes long holds up no fetch's end, but the cache's") {
    Gate gate;
    Consumer side;
    side.link->on_register = [&] { gate.pass(); };
    Fetch late = side.fetch(/*timeout=*/0.05);
    Fetch cancelled = side.fetch();
    REQUIRE(eventually([&] { return gate.waiting.load(); }));
    CHECK(late.wait(10));
    CHECK(late.status().code == StatusCode::kTimeout);
    cancelled.cancel();
    CHECK(cancelled.done());
    std::atomic<bool> unregistered = false;
    std::thread owner([&] {
      side.agent->unregister_cache(side.cache);
      unregistered = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    CHECK(!unregistered);
    gate.open();
    owner.join();
    CHECK(side.heard(MessageType::kFetchDirect).empty());
  }

  TEST_CASE("what a lost peer could write into is unpinned elsewhere, and before unregister ends") {
    for (const bool inbound : {false, true}) {
      CAPTURE(inbound);
      Gate gate;
      std::unique_ptr<Side> side;
      std::optional<Offer> offer;
      if (inbound) {
        auto producer = std::make_unique<Producer>();
        producer->link->on_drop = [&] { gate.pass(); };
        offer = producer->offer();
        producer->open();
        producer->link->say(Producer::request(1).encode());
        REQUIRE(
            eventually([&] { return producer->heard(MessageType::kAcceptDirect).size() == 1; }));
        offer->release();
        side = std::move(producer);
      } else {
        auto consumer = std::make_unique<Consumer>();
        consumer->link->on_drop = [&] { gate.pass(); };
        Fetch fetch = consumer->fetch();
        REQUIRE(eventually([&] { return consumer->heard(MessageType::kFetchDirect).size() == 1; }));
        fetch.cancel();
        side = std::move(consumer);
      }
      side->end();  // as on the control loop: it comes back, and the mutex is free
      REQUIRE(eventually([&] { return gate.waiting.load(); }));
      CHECK(gate.thread != std::this_thread::get_id());
      CHECK(side->agent->stats().peers == 0);
      std::atomic<bool> unregistered = false;
      std::thread owner([&] {
        side->agent->unregister_cache(side->cache);
        unregistered = true;
      });
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      CHECK(!unregistered);
      gate.open();
      owner.join();
    }
  }

  TEST_CASE("a producer that registers goes on packing, and may release") {
    Gate gate;
    Producer side;
    side.link->on_register = [&] { gate.pass(); };
    Offer offer = side.offer();
    side.open();
    side.link->say(Producer::request(1).encode());
    REQUIRE(eventually([&] { return gate.waiting.load(); }));
    const auto other = std::make_shared<FakeLink>(/*one_sided=*/true);
    const PeerId peer = side.agent->add_peer("other");
    side.agent->attach(peer, other, 8, /*inbound=*/true, "test");
    other->say(wire::Hello{wire::kProtocolVersion, 8, "other", kSlot, 31}.encode());
    Producer::announce(*other);
    wire::Fetch fetch = Producer::request(2).fetch;
    fetch.slots = {0, 1, 2, 3, 4, 5, 6, 7};
    other->say(fetch.encode());
    CHECK(eventually([&] { return side.agent->stats().bytes_sent == 32 * 8 * 128; }));
    offer.release();
    CHECK(eventually([&] { return offer.released(); }));
    CHECK(side.heard(MessageType::kAcceptDirect).empty());
    gate.open();
    CHECK(eventually([&] { return side.heard(MessageType::kRefused).size() == 1; }));
    other->end();
  }

  TEST_CASE("close() releases what an adapter never said that it has read") {
    Producer side;
    side.link->writes_take_long = true;
    Offer offer = side.offer();
    side.open();
    side.link->say(Producer::request(1).encode());
    REQUIRE(eventually([&] { return side.heard(MessageType::kAcceptDirect).size() == 1; }));
    side.link->say(wire::Credit{1, {0}}.encode());
    REQUIRE(eventually([&] { return side.link->under_way != 0; }));
    side.agent->close();
    CHECK(offer.released());
    side.ended = true;  // its link never does
  }

  TEST_CASE("who never lets go loses its connection, and the fetch waits for its end") {
    for (const bool silent : {true, false}) {
      CAPTURE(silent);
      Consumer side(Path::kDirect, /*heartbeat_timeout=*/1);
      const auto began = std::chrono::steady_clock::now();
      Fetch fetch = side.fetch(/*timeout=*/0.2);
      side.accept();
      REQUIRE(eventually([&] {
        if (!silent) side.link->say(wire::encode_ping());
        return side.link->closed();
      }));
      CHECK(fetch.status().code == StatusCode::kTimeout);
      CHECK(side.link->reason.find("writes no more into the blocks") != std::string::npos);
      // Its adapter may be failing over: others have fetches on this connection, too.
      if (!silent) CHECK(std::chrono::steady_clock::now() - began > std::chrono::seconds(1));
      CHECK(!fetch.done());  // its link is closing: queue pairs are there yet
      side.end();
      CHECK(fetch.done());
    }
  }

  TEST_CASE("an answer to what was not asked, or in another way, ends the link") {
    Consumer side(Path::kStaged);
    side.fetch();
    REQUIRE(eventually([&] { return side.heard(MessageType::kFetch).size() == 1; }));
    wire::AcceptDirect answer;
    answer.accept.fetch_id = wire::Fetch::decode(side.heard(MessageType::kFetch)[0]).fetch_id;
    answer.accept.order = {0, 1, 2, 3, 4};
    answer.accept.producer_block_size = 16;
    side.link->say(answer.encode());
    CHECK(side.link->closed());
  }

  TEST_CASE("a producer writes what was asked for to where it was asked for, and counts it") {
    Producer side;
    Offer offer = side.offer();
    side.open();
    side.link->say(Producer::request(1).encode());
    REQUIRE(eventually([&] { return side.heard(MessageType::kAcceptDirect).size() == 1; }));
    const auto answer = wire::AcceptDirect::decode(side.heard(MessageType::kAcceptDirect)[0]);
    CHECK(answer.direct == 1);
    CHECK(side.link->written.empty());
    const uint64_t held = side.agent->stats().held_bytes;
    side.link->say(wire::Credit{1, {0, 1, 2, 3, 4, 5, 6, 7}}.encode());
    REQUIRE(eventually([&] {
      const auto stats = side.agent->stats();
      return stats.bytes_sent == 32 * 8 * 128;
    }));
    uint64_t bytes = 0;
    for (const DirectPiece& piece : side.link->written) {
      bytes += piece.bytes;
      const auto from = static_cast<uint64_t>(piece.source - side.memory.data());
      const uint64_t block = 16 * 8 * 128;
      // Blocks 1 and 2 of ours are 4 and 2 of theirs.
      CHECK(piece.offset == from + (from < 2 * block ? 3 * block : 0));
    }
    CHECK(bytes == 32 * 8 * 128);
    CHECK(held > sizeof(DirectPiece) * side.link->written.size());
    side.link->say(wire::encode_fetch_id(MessageType::kDone, 1));
    CHECK(eventually([&] { return offer.released(); }));
    CHECK(side.agent->stats().held_bytes < held);
  }

  TEST_CASE("a cache is registered once for all who wait") {
    Producer side;
    Offer offer = side.offer();
    side.open();
    for (const uint64_t id : {1, 2, 3}) side.link->say(Producer::request(id).encode());
    REQUIRE(eventually([&] { return side.heard(MessageType::kAcceptDirect).size() == 3; }));
    CHECK(side.link->registrations == 1);
  }

  TEST_CASE("blocks that an adapter reads are not released") {
    Producer side;
    side.link->writes_take_long = true;
    Offer offer = side.offer();
    side.open();
    side.link->say(Producer::request(1).encode());
    REQUIRE(eventually([&] { return side.heard(MessageType::kAcceptDirect).size() == 1; }));
    side.link->say(wire::Credit{1, {0}}.encode());
    REQUIRE(eventually([&] { return side.link->under_way != 0; }));
    offer.release();
    side.link->say(wire::encode_fetch_id(MessageType::kCancel, 1));
    CHECK(!offer.released());
    CHECK(side.heard(MessageType::kCancelled).empty());
    side.link->end_write();
    CHECK(offer.released());
    CHECK(side.heard(MessageType::kCancelled).size() == 1);
  }

  TEST_CASE("what makes no sense ends the link, or is refused") {
    const auto refused = [](Producer& side) {
      REQUIRE(eventually([&] { return side.heard(MessageType::kRefused).size() == 1; }));
      CHECK(!side.link->closed());
      return wire::Refused::decode(side.heard(MessageType::kRefused)[0]).code;
    };
    SUBCASE("FETCH_DIRECT without MEMORY") {
      Producer side;
      Offer offer = side.offer();
      side.link->say(Producer::request(1).encode());
      CHECK(refused(side) == StatusCode::kProtocol);
    }
    SUBCASE("blocks that the cache has not, or too few") {
      for (const auto& blocks : {std::vector<uint32_t>{4, 16}, std::vector<uint32_t>{4}}) {
        Producer side;
        Offer offer = side.offer();
        side.open();
        wire::FetchDirect message = Producer::request(1);
        message.blocks = blocks;
        side.link->say(message.encode());
        CHECK(refused(side) == StatusCode::kProtocol);
      }
    }
    SUBCASE("MEMORY of a cache that is not known") {
      Producer side;
      side.link->say(wire::Memory{2, wire::Bytes(8)}.encode());
      CHECK(side.link->closed());
    }
    SUBCASE("MEMORY twice") {
      Producer side;
      side.open();
      CHECK(!side.link->closed());
      side.open();
      CHECK(side.link->closed());
    }
  }

  TEST_CASE("more keys than a peer may have kept, whose fetches are staged") {
    Producer side;
    Offer offer = side.offer();
    const uint64_t before = side.agent->stats().held_bytes;
    side.open(300u << 10);
    CHECK(!side.link->closed());
    CHECK(side.agent->stats().held_bytes == before);
    side.link->say(Producer::request(1).encode());
    REQUIRE(eventually([&] { return side.heard(MessageType::kAcceptDirect).size() == 1; }));
    const auto answer = wire::AcceptDirect::decode(side.heard(MessageType::kAcceptDirect)[0]);
    CHECK(answer.direct == 0);
    CHECK(answer.path_why.find("peer_bytes") != std::string::npos);
    CHECK(side.link->registrations == 0);
    side.open();
    CHECK(side.link->closed());  // MEMORY twice
  }

  TEST_CASE("keys that a fetch keeps count, whatever becomes of their layout") {
    Producer side;
    Offer offer = side.offer();
    for (uint64_t id = 1; id <= 8; ++id) {
      Producer::announce(*side.link);
      side.open(100u << 10);
      side.link->say(Producer::request(id).encode());
      REQUIRE(eventually([&] {
        return side.heard(MessageType::kAcceptDirect).size() +
                   side.heard(MessageType::kRefused).size() ==
               id;
      }));
      CHECK(side.agent->stats().held_bytes <= 1u << 20);
    }
    const size_t accepted = side.heard(MessageType::kAcceptDirect).size();
    CHECK(accepted >= 1);
    CHECK(accepted <= 5);  // each has 200 KiB of keys, twice as many as they say
    const auto refused = side.heard(MessageType::kRefused);
    REQUIRE(!refused.empty());
    CHECK(wire::Refused::decode(refused[0]).code == StatusCode::kBusy);
    side.end();
    CHECK(side.agent->stats().held_bytes == 0);
  }

  TEST_CASE("keys count while their layout is known") {
    Producer side;
    const uint64_t before = side.agent->stats().held_bytes;
    side.open(1000);
    CHECK(side.agent->stats().held_bytes == before + 2000);
    side.end();
    CHECK(side.agent->stats().held_bytes == 0);
  }
}

}  // namespace
}  // namespace kvxfer
