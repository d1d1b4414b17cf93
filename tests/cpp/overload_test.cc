// More is asked than fits: what a peer makes an agent keep is bounded, peers take turns, and what
// is refused is refused with BUSY.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "engine/fair_queue.h"
#include "fake_link.h"
#include "kvxfer/agent.h"
#include "wire/messages.h"

namespace kvxfer {
namespace {

using testing::FakeLink;
using wire::MessageType;

constexpr uint32_t kSlot = 64u << 10, kSlots = 16;
constexpr uint32_t kChunk = 4096, kChunks = 8;  // of two blocks

Generation generation_of(uint8_t number) {
  Generation generation{};
  generation[0] = std::byte{number};
  return generation;
}

wire::Refused refusal_of(const wire::Bytes& message) {
  REQUIRE(wire::type_of(message) == MessageType::kRefused);
  return wire::Refused::decode(std::span(message).subspan(1));
}

size_t count(const std::vector<wire::Bytes>& messages, MessageType type) {
  return static_cast<size_t>(
      std::count_if(messages.begin(), messages.end(),
                    [&](const wire::Bytes& message) { return wire::type_of(message) == type; }));
}

template <typename Condition>
bool eventually(const Condition& condition) {
  for (int i = 0; i < 5000 && !condition(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return condition();
}

struct Host {
  explicit Host(uint64_t peer_bytes = 1u << 20, double heartbeat = 1.0) : memory(1u << 20) {
    AgentOptions options;
    options.name = "host";
    options.arena_bytes = kSlots * kSlot;
    options.slot_bytes = kSlot;
    options.peer_bytes = peer_bytes;
    options.heartbeat_interval = heartbeat;
    options.heartbeat_timeout = 1e6;  // its peers say nothing by themselves
    agent = std::make_unique<Agent>(options);
    layout.num_blocks = 16;
    layout.block_size = 16;
    layout.num_heads = 8;
    layout.layers = {"a"};
    layout.planes = {{"k", 64}};
    layout.views = {{memory.data(), 16 * 8 * 128, 16 * 128, 128, 2}};
    cache = agent->register_cache(layout);
  }
  ~Host() {
    for (const auto& link : links) link->end();
    agent->close();
  }

  // Another peer, which fetches from us if it is `inbound`.
  std::shared_ptr<FakeLink> connect(bool inbound) {
    const std::string name = "peer " + std::to_string(links.size());
    const auto link = std::make_shared<FakeLink>(/*one_sided=*/true, inbound ? kSlots * kSlot : 0);
    peers.push_back(agent->add_peer(name));
    links.push_back(link);
    agent->attach(peers.back(), link, 7, inbound, "test");
    link->say(wire::Hello{wire::kProtocolVersion, 7, name, kSlot, 31}.encode());
    return link;
  }
  Offer offer(uint8_t number, bool ready = true, uint32_t consumers = 1000) {
    OfferSpec spec;
    spec.id = "x" + std::to_string(number);
    spec.generation = generation_of(number);
    spec.cache = cache;
    spec.table.blocks = {1, 2};
    spec.num_tokens = 32;
    spec.ready = ready;
    spec.consumers = consumers;
    return agent->offer(spec);
  }
  Fetch fetch(size_t from, uint8_t number = 1) {
    FetchSpec spec;
    spec.offer_id = "x";
    spec.generation = generation_of(number);
    spec.cache = cache;
    spec.table.blocks = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0};
    spec.num_tokens = 256;
    spec.parts = {{peers.at(from), {0}, 0, 8}};
    return agent->fetch(spec);
  }

  static wire::Layout layout_message(uint32_t cache_id = 1) {
    wire::Layout message;
    message.cache_id = cache_id;
    message.element = static_cast<uint8_t>(ElementType::kBFloat16);
    message.num_blocks = 16;
    message.block_size = 16;
    message.num_heads = 8;
    message.layers = {"a"};
    message.planes = {{"k", 64}};
    message.views = {{0, 16 * 8 * 128, 16 * 128, 128, 2}};
    return message;
  }
  static wire::Fetch fetch_message(uint64_t id, uint8_t number) {
    wire::Fetch message;
    message.fetch_id = id;
    message.offer_id = "x" + std::to_string(number);
    message.generation = generation_of(number);
    message.cache_id = 1;
    message.layers = {0};
    message.head_end = 8;
    message.token_end = 32;
    message.panel_tokens = 64;
    message.chunk_bytes = kChunk;
    return message;
  }

  std::vector<std::byte> memory;
  CacheLayout layout;
  std::unique_ptr<Agent> agent;
  CacheId cache = 0;
  std::vector<PeerId> peers;
  std::vector<std::shared_ptr<FakeLink>> links;
};

TEST_CASE("overload: owners take turns, whatever they queue") {
  FairQueue<int, int> queue;
  const auto anybody = [](int) { return true; };
  CHECK_FALSE(queue.pop(anybody));
  for (int i = 0; i < 5; ++i) queue.push(1, i);
  queue.push(2, 10);
  queue.push(3, 20);
  queue.push(2, 11);
  std::vector<int> order;
  while (const auto item = queue.pop(anybody)) order.push_back(*item);
  CHECK(order == std::vector<int>{0, 10, 20, 1, 11, 2, 3, 4});
  CHECK(queue.empty());

  queue.push(1, 0);
  queue.push(2, 10);
  CHECK(queue.pop([](int owner) { return owner == 2; }) == 10);
  CHECK_FALSE(queue.pop([](int owner) { return owner == 2; }));
  CHECK(queue.pop(anybody) == 0);
}

TEST_CASE("overload: fetches that wait with long lists are refused BUSY beyond a peer's share") {
  Host host;
  const auto greedy = host.connect(true), other = host.connect(true);
  greedy->say(Host::layout_message().encode());
  for (uint64_t id = 1; id <= 100; ++id) {
    auto request = Host::fetch_message(id, 9);  // of an offer that is never made
    request.slots.assign(wire::kMaxSlots, 0);
    greedy->say(request.encode());
  }
  const auto heard = greedy->heard();
  CHECK(count(heard, MessageType::kRefused) >= 98);
  const auto refusal = refusal_of(heard.back());
  CHECK(refusal.code == StatusCode::kBusy);
  CHECK(refusal.retry_ms > 0);
  CHECK(refusal.reason.find("peer_bytes") != std::string::npos);
  CHECK_FALSE(greedy->closed());
  CHECK(host.agent->stats().serving <= 2);
  CHECK(host.agent->stats().held_bytes <= 1u << 20);
  // Another peer is not concerned, and what is given back can be had again.
  other->say(Host::layout_message().encode());
  other->say(Host::fetch_message(1, 9).encode());
  CHECK(count(other->heard(), MessageType::kRefused) == 0);
  greedy->say(wire::encode_fetch_id(MessageType::kCancel, 1));
  auto again = Host::fetch_message(101, 9);
  again.slots.assign(wire::kMaxSlots, 0);
  greedy->say(again.encode());
  CHECK(wire::type_of(greedy->heard().back()) != MessageType::kRefused);
  for (const auto& link : host.links) link->end();
  host.links.clear();
  CHECK(host.agent->stats().held_bytes == 0);
}

TEST_CASE("overload: no peer has more than 4096 fetches or declines open") {
  Host host(uint64_t{1} << 30);
  const auto link = host.connect(true);
  for (uint64_t id = 1; id <= 4100; ++id) {
    link->say(wire::Decline{id, "y", generation_of(9), 1, 1, 0}.encode());
  }
  CHECK(host.agent->stats().serving == 4096);
  CHECK(count(link->heard(), MessageType::kRefused) == 4);
  CHECK(refusal_of(link->heard().back()).code == StatusCode::kBusy);
}

TEST_CASE("overload: plans of fetches that are accepted count, too") {
  Host host(256u << 10);
  const auto link = host.connect(true);
  const Offer offer = host.offer(1);
  link->say(Host::layout_message().encode());
  for (uint64_t id = 1; id <= 1000; ++id) link->say(Host::fetch_message(id, 1).encode());
  const auto heard = link->heard();
  const size_t accepted = count(heard, MessageType::kAccept);
  CHECK(accepted > 10);
  CHECK(accepted + count(heard, MessageType::kRefused) == 1000);
  CHECK(refusal_of(heard.back()).code == StatusCode::kBusy);
  CHECK(host.agent->stats().serving == accepted);
  CHECK(host.agent->stats().held_bytes <= 256u << 10);
  for (uint64_t id = 1; id <= 1000; ++id) {
    link->say(wire::encode_fetch_id(MessageType::kCancel, id));
  }
  CHECK(host.agent->stats().held_bytes < 1024);  // the layout
}

TEST_CASE("overload: layouts beyond a peer's share cost it the connection, and it is told why") {
  Host host(8u << 20);
  const auto greedy = host.connect(true), other = host.connect(true);
  auto large = Host::layout_message();
  large.layers.clear();
  large.views.resize(3000, large.views[0]);
  for (int i = 0; i < 3000; ++i) {
    std::string name = std::to_string(i);
    name.resize(1000, '.');
    large.layers.push_back(std::move(name));
  }
  // A layout is taken where fetches have used up all.
  for (uint64_t id = 1; id <= 100; ++id) {
    auto request = Host::fetch_message(id, 9);
    request.slots.assign(wire::kMaxSlots, 0);
    greedy->say(request.encode());
  }
  CHECK(refusal_of(greedy->heard().back()).code == StatusCode::kBusy);
  for (int i = 0; i < 20; ++i) greedy->say(large.encode());  // the same, again and again
  CHECK_FALSE(greedy->closed());
  for (uint32_t id = 2; id <= 3; ++id) {
    large.cache_id = id;
    greedy->say(large.encode());
  }
  CHECK(greedy->reason.find("no room for its cache") != std::string::npos);
  CHECK(greedy->reason.find("peer_bytes") != std::string::npos);
  const auto last = greedy->heard().back();
  REQUIRE(wire::type_of(last) == MessageType::kBye);
  CHECK(wire::decode_bye(std::span(last).subspan(1)) == greedy->reason);
  CHECK(host.agent->stats().held_bytes <= 12u << 20);
  CHECK_FALSE(other->closed());
  for (const auto& link : host.links) link->end();
  host.links.clear();
  CHECK(host.agent->stats().held_bytes == 0);
}

TEST_CASE("overload: all peers together have a limit") {
  Host host;
  const auto ask = [&](const std::shared_ptr<FakeLink>& link) {
    auto request = Host::fetch_message(1, 9);
    request.slots.assign(wire::kMaxSlots, 0);
    link->say(request.encode());
  };
  for (int i = 0; i < 30; ++i) ask(host.connect(true));
  CHECK(host.agent->stats().held_bytes <= 8u << 20);
  const auto refusal = refusal_of(host.links.back()->heard().back());
  CHECK(refusal.code == StatusCode::kBusy);
  CHECK(refusal.reason.find("all peers") != std::string::npos);
}

TEST_CASE("overload: a fetch that is refused BUSY says so, and when to try again") {
  Host host;
  const auto link = host.connect(false);
  const Fetch fetch = host.fetch(0);
  link->say(wire::Refused{1, StatusCode::kBusy, "much to do", 1500}.encode());
  REQUIRE(fetch.wait(5));
  CHECK(fetch.status().code == StatusCode::kBusy);
  CHECK(fetch.report().retry_after == 1.5);
}

TEST_CASE("overload: credits for more slots than there are chunks end the link") {
  Host host;
  const auto link = host.connect(true);
  const Offer offer = host.offer(1, /*ready=*/false);
  link->say(Host::layout_message().encode());
  link->say(Host::fetch_message(1, 1).encode());
  link->say(wire::Credit{1, std::vector<uint32_t>(kChunks, 0)}.encode());
  CHECK_FALSE(link->closed());
  link->say(wire::Credit{1, {0}}.encode());
  CHECK(link->reason.find("more slots than chunks") != std::string::npos);
}

TEST_CASE("overload: a peer with many fetches does not hold up one with a single one") {
  constexpr uint64_t kFetches = 60;
  Host host(16u << 20);
  const auto many = host.connect(true), single = host.connect(true);
  const Offer offer = host.offer(1, /*ready=*/false);
  const auto ask = [&](FakeLink& link, uint64_t id) {
    auto request = Host::fetch_message(id, 1);
    for (uint32_t slot = 0; slot < kChunks; ++slot) request.slots.push_back(slot);
    link.say(request.encode());
  };
  many->say(Host::layout_message().encode());
  single->say(Host::layout_message().encode());
  for (uint64_t id = 1; id <= kFetches; ++id) ask(*many, id);
  ask(*single, 1);
  const auto commits = [](FakeLink& link) { return count(link.heard(), MessageType::kCommit); };
  std::atomic<size_t> of_others = 0;
  single->on_send = [&](const wire::Bytes& message) {
    if (wire::type_of(message) == MessageType::kCommit) of_others = commits(*many);
  };
  Offer(offer).mark_all_ready();
  REQUIRE(eventually([&] { return commits(*single) == kChunks; }));
  // One for each of the single one's, and what was under way when the last was packed.
  CHECK(of_others <= kChunks + 2);
  CHECK(eventually([&] { return commits(*many) == kFetches * kChunks; }));
}

// Slots that the agent has let the other side of a link use.
size_t granted(FakeLink& link) {
  size_t slots = 0;
  for (const wire::Bytes& message : link.heard()) {
    const auto body = std::span(message).subspan(1);
    if (wire::type_of(message) == MessageType::kFetch)
      slots += wire::Fetch::decode(body).slots.size();
    if (wire::type_of(message) == MessageType::kCredit)
      slots += wire::Credit::decode(body).slots.size();
  }
  return slots;
}

// What its producer says to Host::fetch().
void accept(FakeLink& link, uint64_t id) {
  wire::Accept accept;
  accept.fetch_id = id;
  accept.order = {0, 1, 2, 3, 4};
  accept.wire_bytes = 256 * 8 * 128;
  accept.num_chunks = 2;
  accept.producer_block_size = 16;
  accept.element = static_cast<uint8_t>(ElementType::kBFloat16);
  for (const wire::Bytes& message : link.heard()) {
    if (wire::type_of(message) != MessageType::kFetch) continue;
    const auto chunk = wire::Fetch::decode(std::span(message).subspan(1)).chunk_bytes;
    accept.num_chunks = static_cast<uint32_t>((accept.wire_bytes + chunk - 1) / chunk);
  }
  link.say(accept.encode());
}

TEST_CASE("overload: a producer that does not use its slots leaves half of the arena to others") {
  Host host;
  const auto slow = host.connect(false), other = host.connect(false);
  std::vector<Fetch> fetches;
  for (uint8_t id = 1; id <= 20; ++id) {
    fetches.push_back(host.fetch(0, id));
    accept(*slow, id);
    REQUIRE_FALSE(slow->closed());
  }
  CHECK(granted(*slow) == kSlots / 2);
  fetches.push_back(host.fetch(1));
  accept(*other, 1);
  CHECK(granted(*other) >= 2);
  // Where there is no other, it may have them all.
  other->end();
  host.links.pop_back();
  CHECK(granted(*slow) == kSlots);
}

TEST_CASE("overload: fetches whose offers are not made leave slots to others from that producer") {
  Host host;
  const auto link = host.connect(false), other = host.connect(false);
  std::vector<Fetch> early;
  for (uint8_t id = 1; id <= 20; ++id) early.push_back(host.fetch(0, id));
  CHECK(granted(*link) == kSlots / 4);  // the first went along
  const Fetch late = host.fetch(0, 21);
  accept(*link, 21);
  CHECK(granted(*link) >= kSlots / 4 + 2);
}

TEST_CASE("overload: a producer that was cut off gets no more slots") {
  Host host;
  const auto link = host.connect(false), other = host.connect(false);
  std::vector<Fetch> fetches;
  for (uint8_t id = 1; id <= 20; ++id) {
    fetches.push_back(host.fetch(0, id));
    accept(*link, id);
  }
  link->say({});  // no message
  REQUIRE(link->closed());
  for (const Fetch& fetch : fetches) CHECK(fetch.done());
  CHECK(host.agent->stats().quarantined_slots == kSlots / 2);
  CHECK(host.agent->stats().free_slots == kSlots / 2);
}

TEST_CASE("overload: no peer fails with OK, for its fetches would pass for delivered") {
  Host host;
  host.connect(false);
  const Fetch fetch = host.fetch(0);
  CHECK_THROWS_AS(host.agent->fail_peer(host.peers[0], {}), Error);
  CHECK_FALSE(fetch.done());
}

TEST_CASE("overload: a fetch that is too large alone is not told to try again") {
  Host host(128u << 10);
  const auto link = host.connect(true);
  link->say(Host::layout_message().encode());
  auto request = Host::fetch_message(1, 9);
  request.slots.assign(wire::kMaxSlots, 0);
  link->say(request.encode());
  const auto refusal = refusal_of(link->heard().back());
  CHECK(refusal.code == StatusCode::kNoResources);
  CHECK(refusal.retry_ms == 0);
  CHECK(refusal.reason.find("peer_bytes") != std::string::npos);
  link->say(Host::fetch_message(2, 9).encode());  // a small one waits for its offer
  CHECK(host.agent->stats().serving == 1);
}

TEST_CASE("overload: a connection whose place was taken ends when nothing is fetched over it") {
  Host host(1u << 20, /*heartbeat=*/0.01);
  const auto first = host.connect(false), second = host.connect(false);
  const Fetch fetch = host.fetch(0);
  host.agent->retire_peer(host.peers[0]);
  host.agent->retire_peer(9999);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK(host.agent->peer_alive(host.peers[0]));
  Fetch(fetch).cancel();
  CHECK(eventually([&] { return !host.agent->peer_alive(host.peers[0]); }));
  CHECK(first->reason.find("taken its place") != std::string::npos);
  CHECK(host.agent->peer_alive(host.peers[1]));
}

TEST_CASE("overload: an id that is open under another generation is no newer than the ticket") {
  Host host;
  const auto link = host.connect(true);
  const Offer offer = host.offer(1);
  link->say(Host::layout_message().encode());
  auto request = Host::fetch_message(1, 1);
  request.generation = generation_of(2);
  link->say(request.encode());
  const auto refusal = refusal_of(link->heard().back());
  CHECK(refusal.code == StatusCode::kStale);
  CHECK(refusal.reason.find("newer") == std::string::npos);
  CHECK(refusal.reason.find("earlier or of a later request") != std::string::npos);
}

}  // namespace
}  // namespace kvxfer
