// An agent and a peer that breaks the rules: the link goes, the agent stays, and nothing is read or
// written out of bounds.

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <functional>
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

Generation generation_of(int number) {
  Generation generation{};
  generation[0] = static_cast<std::byte>(number);
  return generation;
}

struct Victim {
  explicit Victim(bool inbound, bool one_sided = true, size_t mapped = 0)
      : memory(1u << 20), link(std::make_shared<FakeLink>(one_sided, mapped)) {
    AgentOptions options;
    options.name = "victim";
    options.arena_bytes = 4u << 20;
    options.slot_bytes = 64u << 10;
    agent = std::make_unique<Agent>(options);
    layout.num_blocks = 16;
    layout.block_size = 16;
    layout.num_heads = 8;
    layout.layers = {"a"};
    layout.planes = {{"k", 64}};
    layout.views = {{memory.data(), 16 * 8 * 128, 16 * 128, 128, 2}};
    cache = agent->register_cache(layout);
    peer = agent->add_peer("them");
    agent->attach(peer, link, 7, inbound, "test");
    link->say(wire::Hello{wire::kProtocolVersion, 7, "them", 64u << 10, 31}.encode());
  }
  ~Victim() {
    link->end();
    agent->close();
  }

  Fetch fetch(int number = 1) {
    FetchSpec spec;
    spec.offer_id = "x";
    spec.generation = generation_of(number);
    spec.cache = cache;
    spec.table.blocks = {1, 2};
    spec.num_tokens = 32;
    spec.parts = {{peer, {0}, 0, 8}};
    return agent->fetch(spec);
  }
  Offer offer(int number = 1, uint32_t consumers = 1) {
    OfferSpec spec;
    spec.id = "x";
    spec.generation = generation_of(number);
    spec.cache = cache;
    spec.table.blocks = {1, 2};
    spec.num_tokens = 32;
    spec.consumers = consumers;
    return agent->offer(spec);
  }
  wire::Bytes layout_message() const {
    wire::Layout message;
    message.cache_id = 1;
    message.element = static_cast<uint8_t>(layout.element);
    message.num_blocks = 16;
    message.block_size = 16;
    message.num_heads = 8;
    message.layers = {"a"};
    message.planes = {{"k", 64}};
    message.views = {{0, 16 * 8 * 128, 16 * 128, 128, 2}};
    return message.encode();
  }
  wire::Fetch fetch_message(int number = 1) const {
    wire::Fetch message;
    message.fetch_id = 1;
    message.offer_id = "x";
    message.generation = generation_of(number);
    message.cache_id = 1;
    message.layers = {0};
    message.head_end = 8;
    message.token_end = 32;
    message.panel_tokens = 64;
    message.chunk_bytes = 64u << 10;
    message.slots = {0};
    return message;
  }
  // Answers the fetch as an honest producer would begin to; returns its first slot.
  uint32_t accept() {
    const wire::Fetch request = last_fetch();
    wire::Accept accept;
    accept.fetch_id = request.fetch_id;
    accept.order = {0, 1, 2, 3, 4};
    accept.num_chunks = 1;
    accept.wire_bytes = 32 * 8 * 128;
    accept.producer_block_size = 16;
    accept.element = static_cast<uint8_t>(layout.element);
    link->say(accept.encode());
    return request.slots.at(0);
  }
  uint32_t granted() const { return last_fetch().slots.at(0); }
  wire::Fetch last_fetch() const {
    const auto heard = link->heard();
    const auto found = std::find_if(heard.rbegin(), heard.rend(), [](const wire::Bytes& message) {
      return wire::type_of(message) == wire::MessageType::kFetch;
    });
    REQUIRE(found != heard.rend());
    return wire::Fetch::decode(std::span(*found).subspan(1));
  }
  bool untouched() const {
    return std::all_of(memory.begin(), memory.end(), [](std::byte b) { return b == std::byte{}; });
  }
  bool ended_with(const Fetch& fetch, StatusCode code) const {
    return fetch.wait(5) && fetch.status().code == code;
  }

  std::vector<std::byte> memory;
  CacheLayout layout;
  std::unique_ptr<Agent> agent;
  std::shared_ptr<FakeLink> link;
  CacheId cache = 0;
  PeerId peer = 0;
};

TEST_CASE("hostile: commits of chunks and slots that do not exist end the link") {
  for (const uint32_t chunk : {1u, 2u, 0x7fffffffu, UINT32_MAX - 1, UINT32_MAX}) {
    CAPTURE(chunk);
    Victim victim(false);
    const Fetch fetch = victim.fetch();
    const uint32_t slot = victim.accept();
    victim.link->say(wire::Commit{1, chunk, slot, 32 * 8 * 128, {}}.encode());
    CHECK(victim.ended_with(fetch, StatusCode::kProtocol));
    CHECK_FALSE(victim.link->reason.empty());
  }
  for (const uint32_t slot : {63u, 64u, 1000000u, UINT32_MAX}) {
    CAPTURE(slot);
    Victim victim(false);
    const Fetch fetch = victim.fetch();
    victim.accept();
    victim.link->say(wire::Commit{1, 0, slot, 32 * 8 * 128, {}}.encode());
    CHECK(victim.ended_with(fetch, StatusCode::kProtocol));
  }
}

TEST_CASE("hostile: a commit without a write is refused where writes are announced") {
  Victim victim(false, /*one_sided=*/false);
  const Fetch fetch = victim.fetch();
  const uint32_t slot = victim.accept();
  victim.link->say(wire::Commit{1, 0, slot, 32 * 8 * 128, {}}.encode());
  CHECK(victim.ended_with(fetch, StatusCode::kProtocol));
}

TEST_CASE("hostile: an ACCEPT of other sizes fails the fetch alone") {
  Victim victim(false);
  const Fetch fetch = victim.fetch();
  wire::Accept accept{1, {0, 1, 2, 3, 4}, 0, 7, 12345, 16, 0, 0, 2, 0, {}, 0, UINT32_MAX, {}, ""};
  victim.link->say(accept.encode());
  CHECK(victim.ended_with(fetch, StatusCode::kMismatch));
  CHECK(victim.link->reason.empty());
}

TEST_CASE("hostile: slots outside the arena end the link, not the owner's offer") {
  for (const bool before_offer : {true, false}) {
    CAPTURE(before_offer);
    Victim victim(true, false, /*mapped=*/4u << 20);
    victim.link->say(victim.layout_message());
    auto request = victim.fetch_message();
    request.slots = {64};
    std::vector<Offer> offers;
    if (!before_offer) offers.push_back(victim.offer());
    victim.link->say(request.encode());
    CHECK(victim.link->reason.find("outside the arena") != std::string::npos);
    if (before_offer) offers.push_back(victim.offer());
    offers[0].release();
    CHECK(offers[0].wait(5));
  }
}

TEST_CASE("hostile: senseless fetches and layouts end the link or are refused") {
  const auto after = [](const std::function<void(Victim&)>& action) {
    Victim victim(true, false, 4u << 20);
    const Offer offer = victim.offer();
    victim.link->say(victim.layout_message());
    action(victim);
    const bool refused = !victim.link->sent.empty() &&
                         wire::type_of(victim.link->sent.back()) == wire::MessageType::kRefused;
    CHECK((refused || !victim.link->reason.empty()));
    CHECK_FALSE(offer.released());
  };
  const auto with = [&](const std::function<void(wire::Fetch&)>& change) {
    after([&](Victim& victim) {
      auto request = victim.fetch_message();
      change(request);
      victim.link->say(request.encode());
    });
  };
  with([](wire::Fetch& f) { f.chunk_bytes = 1; });
  with([](wire::Fetch& f) { f.chunk_bytes = UINT32_MAX; });
  with([](wire::Fetch& f) { f.token_end = UINT32_MAX; });
  with([](wire::Fetch& f) { f.token_begin = 32; });
  with([](wire::Fetch& f) { f.head_end = UINT32_MAX; });
  with([](wire::Fetch& f) { f.head_begin = 8; });
  with([](wire::Fetch& f) { f.slot_in_block = UINT32_MAX; });
  with([](wire::Fetch& f) { f.layers = {}; });
  with([](wire::Fetch& f) { f.layers = {0, 0}; });
  with([](wire::Fetch& f) { f.layers = {UINT32_MAX}; });
  with([](wire::Fetch& f) { f.cache_id = 99; });
  with([](wire::Fetch& f) { f.codec = 200; });
  with([](wire::Fetch& f) { f.offer_id = "another"; });
  after([](Victim& victim) {  // the same id twice
    victim.link->say(victim.fetch_message(5).encode());
    victim.link->say(victim.fetch_message(5).encode());
  });
  after([](Victim& victim) {
    victim.link->say(wire::encode_fetch_id(wire::MessageType::kCancelled, 1));  // consumers don't
  });
  after([](Victim& victim) { victim.link->say({std::byte{200}}); });
  after([](Victim& victim) { victim.link->say({}); });
  after([](Victim& victim) {
    wire::Layout layout{2, "", 2, 16, 16, 8, 0, {"a"}, {{"k", 64}}, {{0, INT64_MIN, 1, 1, 1}}, {}};
    victim.link->say(layout.encode());
  });
}

TEST_CASE("hostile: a fetch cannot be made to end twice") {
  Victim victim(false);
  Fetch fetch = victim.fetch();
  victim.link->say(wire::Refused{1, StatusCode::kStale, "gone"}.encode());
  CHECK(victim.ended_with(fetch, StatusCode::kStale));
  victim.link->say(wire::Refused{1, StatusCode::kExpired, "again"}.encode());
  victim.link->say(wire::encode_fetch_id(wire::MessageType::kCancelled, 1));
  victim.link->say(wire::Want{1, UINT32_MAX}.encode());
  victim.accept();
  CHECK(fetch.status().code == StatusCode::kStale);
  CHECK(victim.link->reason.empty());
  const AgentStats stats = victim.agent->stats();
  CHECK(stats.free_slots == stats.slots);
}

// Over a link whose peer writes without asking, as RDMA, notices are all that comes of a write.

TEST_CASE("hostile: notices of writes that make no sense end the link") {
  const wire::Bytes good = wire::Commit{1, 0, 0, 32 * 8 * 128, {}}.encode();
  const wire::Bytes others[] = {
      {},
      {std::byte{200}},
      {good[0]},
      {good.begin(), good.end() - 1},
      wire::encode_ping(),
      wire::encode_fetch_id(wire::MessageType::kDone, 1),
      wire::Want{1, 7}.encode(),
  };
  for (const wire::Bytes& notice : others) {
    for (const bool early : {true, false}) {
      CAPTURE(early);
      Victim victim(false);
      const Fetch fetch = victim.fetch();
      if (!early) victim.accept();
      victim.link->land(notice);
      CHECK(victim.ended_with(fetch, StatusCode::kProtocol));
      CHECK_FALSE(victim.link->reason.empty());
    }
  }
}

TEST_CASE("hostile: notices about slots and chunks that were not granted end the link") {
  for (const bool early : {true, false}) {
    CAPTURE(early);
    const auto after = [&](uint32_t chunk, int64_t slot, uint32_t bytes) {
      CAPTURE(chunk);
      CAPTURE(slot);
      CAPTURE(bytes);
      Victim victim(false);
      Fetch fetch = victim.fetch();
      const uint32_t granted = victim.granted();
      if (!early) victim.accept();
      const uint32_t named = slot < 0 ? granted : static_cast<uint32_t>(slot);
      victim.link->land(wire::Commit{1, chunk, named, bytes, {}}.encode());
      if (early) victim.accept();  // with which it becomes known what the chunks are
      CHECK(victim.ended_with(fetch, StatusCode::kProtocol));
      CHECK_FALSE(victim.link->reason.empty());
      CHECK(victim.untouched());
    };
    for (const int64_t slot : {63ll, 64ll, 1000000ll, 0xffffffffll}) after(0, slot, 32 * 8 * 128);
    for (const uint32_t chunk : {1u, 0x7fffffffu, UINT32_MAX}) after(chunk, -1, 32 * 8 * 128);
    for (const uint32_t bytes : {0u, 1u, 32u * 8 * 128 - 1, 64u << 10, 64u << 20, UINT32_MAX})
      after(0, -1, bytes);
  }
}

TEST_CASE("hostile: a slot that another fetch holds is not theirs to commit") {
  for (const bool early : {true, false}) {
    CAPTURE(early);
    Victim victim(false);
    const Fetch mine = victim.fetch(1);
    const uint32_t slot = victim.granted();
    if (!early) victim.accept();
    const Fetch other = victim.fetch(2);
    if (!early) victim.accept();
    victim.link->land(wire::Commit{2, 0, slot, 32 * 8 * 128, {}}.encode());
    CHECK(victim.ended_with(mine, StatusCode::kProtocol));
    CHECK(victim.ended_with(other, StatusCode::kProtocol));
    CHECK(victim.untouched());
  }
}

TEST_CASE("hostile: notices that are early, repeated or late do what one in time does") {
  Victim victim(false);
  Fetch fetch = victim.fetch();
  const uint32_t slot = victim.granted();
  const wire::Bytes wrong = wire::Commit{1, 0, slot, 32 * 8 * 128, {}}.encode();
  victim.link->land(wire::Commit{99, 0, 12345, 7, {}}.encode());  // of no fetch: cancelled, say
  victim.link->land(wrong);
  victim.link->land(wrong);
  CHECK_FALSE(fetch.done());
  CHECK(victim.untouched());
  victim.accept();
  CHECK(victim.ended_with(fetch, StatusCode::kCorrupt));  // its digest is none
  CHECK(victim.link->reason.empty());
  for (int i = 0; i < 3; ++i) victim.link->land(wrong);
  CHECK(victim.link->reason.empty());
  victim.link->say(wire::encode_fetch_id(wire::MessageType::kCancelled, 1));
  const AgentStats stats = victim.agent->stats();
  CHECK(stats.free_slots == stats.slots);
  CHECK(stats.digest_errors == 1);
}

TEST_CASE("hostile: what lands after a cancel stays in quarantine until the peer says so") {
  Victim victim(false);
  Fetch fetch = victim.fetch();
  const uint32_t slot = victim.granted();
  victim.accept();
  fetch.cancel();
  const wire::Bytes notice = wire::Commit{1, 0, slot, 32 * 8 * 128, {}}.encode();
  for (int i = 0; i < 2; ++i) victim.link->land(notice);
  CHECK(victim.agent->stats().quarantined_slots > 0);
  CHECK(victim.untouched());
  victim.link->say(wire::encode_fetch_id(wire::MessageType::kCancelled, 1));
  victim.link->land(notice);
  const AgentStats stats = victim.agent->stats();
  CHECK(stats.free_slots == stats.slots);
  CHECK(victim.link->reason.empty());
}

TEST_CASE("hostile: a fetch that has ended is not done again while a chunk of it is under way") {
  for (const auto first : {wire::MessageType::kDone, wire::MessageType::kCancel}) {
    CAPTURE(static_cast<int>(first));
    Victim victim(true, false);
    victim.link->writes_take_long = true;
    const Offer offer = victim.offer(1, 2);
    victim.link->say(victim.layout_message());
    victim.link->say(victim.fetch_message().encode());
    for (int i = 0; i < 5000 && victim.link->under_way == 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    REQUIRE(victim.link->under_way != 0);
    victim.link->say(wire::encode_fetch_id(first, 1));
    for (int i = 0; i < 2; ++i) {
      victim.link->say(wire::encode_fetch_id(wire::MessageType::kDone, 1));
    }
    CHECK(victim.agent->stats().offers == 1);
    CHECK(victim.link->reason.empty());
    victim.link->end_write();
    CHECK(victim.agent->stats().serving == 0);
  }
}

TEST_CASE("hostile: a producer has no business being written to") {
  Victim victim(true);
  const Offer offer = victim.offer();
  victim.link->land(wire::Commit{1, 0, 0, 32 * 8 * 128, {}}.encode());
  victim.link->land({});
  CHECK_FALSE(victim.link->reason.empty());
  CHECK_FALSE(offer.released());
}

}  // namespace
}  // namespace kvxfer
