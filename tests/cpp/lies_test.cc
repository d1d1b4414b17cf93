// A peer that knows the protocol and lies, in each field of each message in turn: whatever it says,
// others are served, nothing outside its fetch is touched, and nothing of it is left.

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <doctest/doctest.h>

#include "engine_pair.h"
#include "fake_link.h"
#include "kvxfer/agent.h"
#include "kvxfer/digest.h"
#include "lies.h"

namespace kvxfer {
namespace {

using namespace testing;
using wire::MessageType;

constexpr uint32_t kTokens = 32, kSlot = 64u << 10, kSlots = 16;
constexpr uint64_t kPeerBytes = 4u << 20;
constexpr uint64_t kLiarIncarnation = 7;
const std::vector<uint32_t> kBlocks{5, 2};

AgentOptions quiet(const std::string& name, uint64_t incarnation) {
  AgentOptions options = options_of(name, incarnation, kSlots);
  options.heartbeat_interval = 1000;
  options.heartbeat_timeout = 1e6;
  options.peer_bytes = kPeerBytes;
#ifdef __SANITIZE_THREAD__
  // A liar may name a slot twice: two threads then pack into the same memory, which is its own.
  options.threads = 1;
#endif
  return options;
}

void connect(Agent& consumer, PeerId to_producer, uint64_t consumer_is, Agent& producer,
             PeerId to_consumer, uint64_t producer_is) {
  const auto [theirs, ours] = make_loopback_pair(producer.io(), consumer.io(), {});
  producer.attach(to_consumer, theirs, consumer_is, true, "test");
  consumer.attach(to_producer, ours, producer_is, false, "test");
}

// The agent that is lied to, and an honest one that it is connected with in both directions.
struct Victim {
  Victim()
      : mine(2, 8, 16, Order::kHeadMajor),
        theirs(2, 8, 16, Order::kTokenMajor),
        agent(quiet("victim", 1)),
        honest(quiet("honest", 2)) {
    cache = agent.register_cache(mine.layout);
    honest_cache = honest.register_cache(theirs.layout);
    to_honest = agent.add_peer("honest");
    connect(agent, to_honest, 1, honest, honest.add_peer("victim"), 2);
    to_agent = honest.add_peer("victim");
    connect(honest, to_agent, 2, agent, agent.add_peer("honest"), 1);
    serves_others();
    at_rest = agent.stats().held_bytes;
  }

  Offer offer(Agent& from, CacheId of, uint32_t consumers = 1) {
    ++number;
    return from.offer(
        {"request", generation_of(number), of, {kBlocks, 0, 0}, kTokens, 30.0, consumers, true});
  }
  Fetch fetch(Agent& by, CacheId into, PeerId from) {
    return by.fetch({"request",
                     generation_of(number),
                     into,
                     {kBlocks, 0, 0},
                     kTokens,
                     30.0,
                     {{from, {0, 1}, 0, TestCache::kHeads}},
                     {}});
  }
  bool delivers(const Fetch& fetch) {
    return fetch.wait(20) && fetch.status().ok() &&
           same_tokens(mine, kBlocks, theirs, kBlocks, kTokens);
  }
  void serves_others() {
    {
      mine.fill(static_cast<uint32_t>(number) + 1);
      theirs.poison();
      const Offer offered = offer(agent, cache);
      REQUIRE(delivers(fetch(honest, honest_cache, to_agent)));
      REQUIRE(offered.wait(20));
    }
    mine.poison();
    const Offer offered = offer(honest, honest_cache);
    REQUIRE(delivers(fetch(agent, cache, to_honest)));
    REQUIRE(offered.wait(20));
  }
  // What a liar leaves: nothing.
  void is_at_rest() {
    REQUIRE(eventually([&] {
      const AgentStats stats = agent.stats();
      return stats.peers == 2 && stats.serving + stats.fetches + stats.offers == 0 &&
             stats.free_slots == stats.slots && stats.quarantined_slots == 0 &&
             stats.held_bytes == at_rest;
    }));
  }
  bool untouched_but_for(const std::vector<uint32_t>& blocks) {
    for (uint32_t block = 0; block < mine.num_blocks; ++block) {
      if (std::find(blocks.begin(), blocks.end(), block) != blocks.end()) continue;
      for (uint32_t layer = 0; layer < 2; ++layer) {
        for (uint32_t plane = 0; plane < 2; ++plane) {
          const std::byte* begin = mine.row(layer, plane, block, 0, 0);
          const std::byte* end = begin + mine.layout.view(layer, plane).block_stride;
          if (std::any_of(begin, end, [](std::byte b) { return b != std::byte{0xee}; })) {
            return false;
          }
        }
      }
    }
    return true;
  }

  TestCache mine, theirs;
  Agent agent, honest;
  CacheId cache = 0, honest_cache = 0;
  PeerId to_honest = 0, to_agent = 0;
  uint64_t number = 0, at_rest = 0;
};

wire::Hello hello() { return {wire::kProtocolVersion, kLiarIncarnation, "liar", kSlot, 31}; }

wire::Layout layout_of(const TestCache& cache) {
  wire::Layout message;
  message.cache_id = 1;
  message.element = static_cast<uint8_t>(cache.layout.element);
  message.num_blocks = cache.layout.num_blocks;
  message.block_size = cache.layout.block_size;
  message.num_heads = cache.layout.num_heads;
  message.layers = cache.layout.layers;
  for (const PlaneSpec& plane : cache.layout.planes) {
    message.planes.push_back({plane.name, plane.content});
  }
  for (const PlaneView& view : cache.layout.views) {
    message.views.push_back({static_cast<uint64_t>(view.data - cache.layout.views[0].data),
                             view.block_stride, view.head_stride, view.token_stride,
                             view.content_stride});
  }
  return message;
}

// What a script says at the end is true: so each lie meets the agent in the state that it is for.
using Script = std::vector<Said>;

Script of_consumer(const Victim& victim) {
  wire::Fetch fetch;
  fetch.fetch_id = 1;
  fetch.offer_id = "request";
  fetch.generation = generation_of(victim.number);
  fetch.cache_id = 1;
  fetch.layers = {0, 1};
  fetch.head_end = TestCache::kHeads;
  fetch.token_end = kTokens;
  fetch.panel_tokens = 64;
  fetch.chunk_bytes = 4096;
  fetch.slots = {0, 1};
  wire::Fetch second = fetch;
  second.fetch_id = 2;
  second.codec = static_cast<uint8_t>(Codec::kInt8);
  second.chunk_bytes = kSlot;
  return {hello(),
          layout_of(victim.theirs),
          fetch,
          second,
          wire::Credit{1, {2, 3}},
          wire::Renew{"request", fetch.generation},
          wire::Decline{3, "request", fetch.generation, 2, 2, 0},
          Ping{},
          OfFetch{MessageType::kCancel, 2},
          OfFetch{MessageType::kDone, 1},
          Bye{"done"}};
}

// Whether an agent has said something of a kind, waiting a little for its threads.
bool says(FakeLink& link, MessageType type) {
  return eventually([&] {
    const auto heard = link.heard();
    return std::any_of(heard.begin(), heard.end(),
                       [&](const wire::Bytes& message) { return wire::type_of(message) == type; });
  });
}

// Returns what of the liar was open at the worst.
uint64_t lie_to_producer(Victim& victim, const Script& script, size_t at, const wire::Bytes& lie,
                         bool mapped) {
  const Offer offer = victim.offer(victim.agent, victim.cache, 3);
  const auto link = std::make_shared<FakeLink>(mapped, mapped ? size_t{kSlots} * kSlot : 0);
  victim.agent.attach(victim.agent.add_peer("liar"), link, kLiarIncarnation, true, "test");
  uint64_t held = 0;
  for (size_t i = 0; i < script.size(); ++i) {
    link->say(i == at ? lie : encode(script[i]));
    held = std::max(held, victim.agent.stats().held_bytes);
  }
  link->end();
  Offer(offer).release();
  REQUIRE(offer.wait(20));
  return held;
}

TEST_CASE("lies: a consumer that lies, in each field of each message") {
  for (const bool mapped : {true, false}) {
    CAPTURE(mapped);
    Victim victim;
    {  // The truth is served.
      const Offer offer = victim.offer(victim.agent, victim.cache, 3);
      const auto link = std::make_shared<FakeLink>(mapped, mapped ? size_t{kSlots} * kSlot : 0);
      victim.agent.attach(victim.agent.add_peer("liar"), link, kLiarIncarnation, true, "test");
      const Script script = of_consumer(victim);
      for (size_t i = 0; i + 3 < script.size(); ++i) link->say(encode(script[i]));
      CHECK(says(*link, MessageType::kAccept));
      CHECK((!mapped || says(*link, MessageType::kCommit)));
      CHECK(says(*link, MessageType::kDeclined));
      CHECK_FALSE(link->closed());
      link->end();
      Offer(offer).release();
      REQUIRE(offer.wait(20));
    }
    size_t told = 0;
    const size_t messages = of_consumer(victim).size();
    for (size_t at = 0; at < messages; ++at) {
      CAPTURE(at);
      const std::vector<uint64_t> foreign{kSlots - 1, kSlots, victim.cache};
      for (size_t n = 0;; ++n) {
        CAPTURE(n);
        ++victim.number;  // the offer that is about to be made
        const Script script = of_consumer(victim);
        --victim.number;
        const auto lie = lie_for(script[at], n, foreign);
        if (!lie) break;
        const auto said = encode(*lie);
        REQUIRE(lie_to_producer(victim, script, at, said, mapped) <= victim.at_rest + kPeerBytes);
        victim.is_at_rest();
        if (++told % 16 == 0) victim.serves_others();
      }
    }
    victim.serves_others();
    CHECK(told > 500);
  }
}

// A producer answers a fetch, while another holds slots for one of its own.
struct Answered {
  explicit Answered(Victim& to, bool one_sided_link)
      : victim(to), one_sided(one_sided_link), link(std::make_shared<FakeLink>(one_sided)) {
    for (const auto& other : {link, bystander}) {
      const PeerId peer = victim.agent.add_peer(other == link ? "liar" : "bystander");
      victim.agent.attach(peer, other, kLiarIncarnation, false, "test");
      (other == link ? liar : stranger) = peer;
    }
    wire::Hello other = hello();
    other.name = "bystander";
    bystander->say(other.encode());
    others = victim.fetch(victim.agent, victim.cache, stranger);
    other_slot = asked(*bystander).slots.at(0);
  }
  ~Answered() {
    link->end();
    bystander->end();
  }

  static wire::Fetch asked(FakeLink& at) {
    for (const wire::Bytes& message : at.heard()) {
      if (wire::type_of(message) == MessageType::kFetch) {
        return wire::Fetch::decode(std::span(message).subspan(1));
      }
    }
    return {};
  }

  Script script() {
    const uint32_t bytes = kTokens * TestCache::kHeads * TestCache::kContent * 2 * 4;
    wire::Accept accept;
    accept.fetch_id = 1;
    accept.order = {0, 1, 2, 3, 4};
    accept.num_chunks = 1;
    accept.wire_bytes = bytes;
    accept.producer_block_size = 16;
    accept.element = static_cast<uint8_t>(victim.mine.layout.element);
    accept.why = "as asked";
    wire::Commit commit{1, 0, slot, bytes, {}};
    uint64_t halves[2];
    const Generation generation = generation_of(victim.number);
    std::memcpy(halves, generation.data(), sizeof(halves));
    commit.digest = digest(std::vector<std::byte>(bytes, std::byte{0x11}),
                           halves[0] ^ halves[1] ^ 0x9e3779b97f4a7c15u);
    return {hello(),
            Ping{},
            accept,
            wire::Want{1, 1},
            commit,
            OfFetch{MessageType::kDeclined, 99},
            wire::Refused{99, StatusCode::kBusy, "no", 7},
            OfFetch{MessageType::kCancelled, 99},
            Bye{"done"}};
  }

  void say(const Said& said) {
    const auto* commit = std::get_if<wire::Commit>(&said);
    if (commit == nullptr) return link->say(encode(said));
    if (!one_sided) {
      link->write_in(uint64_t{commit->slot} * kSlot, commit->bytes, commit->encode(),
                     std::byte{0x11});
      return;
    }
    link->say(encode(said));
  }

  Victim& victim;
  const bool one_sided;
  std::shared_ptr<FakeLink> link;
  std::shared_ptr<FakeLink> bystander = std::make_shared<FakeLink>(true);
  PeerId liar = 0, stranger = 0;
  uint32_t slot = 0, other_slot = 0;
  std::optional<Fetch> mine, others;
};

// Tells the n-th lie in place of message `at`, if there is one; returns how the fetch ended.
std::optional<StatusCode> lie_to_consumer(Victim& victim, bool one_sided, size_t at, size_t n) {
  victim.mine.poison();
  ++victim.number;
  Answered scene(victim, one_sided);
  const bool truth = at == SIZE_MAX;
  bool asked = false, no_more = false;
  const auto ask = [&] {  // once HELLO was said, true or not
    if (std::exchange(asked, true)) return;
    scene.mine = victim.fetch(victim.agent, victim.cache, scene.liar);
    const auto fetch = Answered::asked(*scene.link);
    if (fetch.slots.empty()) return;
    scene.slot = fetch.slots[0];
    const AgentMemory arena = victim.agent.arena();
    std::fill_n(arena.bytes.data() + size_t{scene.slot} * kSlot, kSlot, std::byte{0x11});
  };
  for (size_t i = 0; i < scene.script().size(); ++i) {
    const Said honest = scene.script()[i];
    // Chunks are unpacked meanwhile; a fetch that was lied to may not end by itself.
    if (std::holds_alternative<Bye>(honest) && scene.mine) scene.mine->wait(truth ? 20 : 0.002);
    const auto lie = i == at ? lie_for(honest, n, {scene.other_slot, victim.cache}) : honest;
    if (!lie) {
      no_more = true;
      break;
    }
    scene.say(*lie);
    if (i == 0 && !scene.link->closed()) ask();
  }
  REQUIRE_FALSE(scene.bystander->closed());
  REQUIRE_FALSE(scene.others->done());
  scene.others->cancel();
  scene.bystander->say(wire::encode_fetch_id(MessageType::kCancelled, 1));
  if (!scene.mine) return no_more ? std::nullopt : std::optional(StatusCode::kPeerLost);
  scene.mine->cancel();
  if (no_more) return std::nullopt;
  const StatusCode code = scene.mine->status().code;
  REQUIRE(victim.untouched_but_for(kBlocks));
  if (code == StatusCode::kOk) {
    const std::byte* row = victim.mine.row(1, 1, kBlocks[1], 3, 15);
    REQUIRE(std::all_of(row, row + 2 * TestCache::kContent,
                        [](std::byte b) { return b == std::byte{0x11}; }));
  }
  return code;
}

TEST_CASE("lies: a producer that lies, in each field of each message") {
  for (const bool one_sided : {true, false}) {
    CAPTURE(one_sided);
    Victim victim;
    // The truth is taken.
    CHECK(lie_to_consumer(victim, one_sided, SIZE_MAX, 0) == StatusCode::kOk);
    victim.is_at_rest();
    size_t told = 0;
    const size_t messages = [&] {
      Answered scene(victim, one_sided);
      const size_t size = scene.script().size();
      scene.others->cancel();
      return size;
    }();
    for (size_t at = 0; at < messages; ++at) {
      CAPTURE(at);
      for (size_t n = 0;; ++n) {
        CAPTURE(n);
        if (!lie_to_consumer(victim, one_sided, at, n)) break;
        victim.is_at_rest();
        if (++told % 16 == 0) victim.serves_others();
      }
    }
    victim.serves_others();
    CHECK(told > 300);
  }
}

TEST_CASE("lies: a write that is not where its COMMIT says, or not of its size") {
  Victim victim;
  const uint32_t bytes = kTokens * TestCache::kHeads * TestCache::kContent * 2 * 4;
  for (const uint64_t offset :
       {uint64_t{0}, uint64_t{1}, uint64_t{kSlot}, uint64_t{1} << 40, UINT64_MAX}) {
    for (const uint64_t size : {uint64_t{bytes}, uint64_t{0}, uint64_t{1} << 30, UINT64_MAX}) {
      if (offset == 0 && size == bytes) continue;
      victim.mine.poison();
      ++victim.number;
      Answered scene(victim, false);
      scene.link->say(hello().encode());
      scene.mine = victim.fetch(victim.agent, victim.cache, scene.liar);
      scene.slot = Answered::asked(*scene.link).slots.at(0);
      const auto script = scene.script();
      scene.say(script[2]);
      const auto commit = std::get<wire::Commit>(script[4]);
      CHECK_FALSE(scene.link->write_in(scene.slot * uint64_t{kSlot} + offset, size, commit.encode(),
                                       std::byte{1}));
      REQUIRE(scene.mine->wait(20));
      CHECK(scene.mine->status().code == StatusCode::kProtocol);
      CHECK(scene.link->closed());
      CHECK(victim.untouched_but_for({}));
      scene.others->cancel();
    }
  }
  victim.serves_others();
}

}  // namespace
}  // namespace kvxfer
