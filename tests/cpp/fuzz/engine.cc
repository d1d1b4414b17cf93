// An agent and a peer that says anything, in any order: nothing is read or written out of bounds,
// nothing of the peer's is left when its link has ended, and others are not concerned.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "kvxfer/agent.h"
#include "wire/messages.h"

namespace {

using namespace kvxfer;

class FakeLink : public Link {
 public:
  FakeLink(bool one_sided, bool direct)
      : one_sided_(one_sided), direct_(direct), arena_(direct ? 0 : 1u << 16) {}
  const char* transport() const override { return "fake"; }
  void start(LinkSink& sink) override { sink_ = &sink; }
  void send(std::span<const std::byte>) override { ++sent; }
  bool one_sided() const override { return one_sided_; }
  std::span<std::byte> mapped_arena() const override { return {arena_.data(), arena_.size()}; }
  void write(std::span<const std::byte>, uint64_t, std::span<const std::byte>,
             uint64_t token) override {
    sink_->on_written(*this, token, true);
  }
  bool direct() const override { return direct_; }
  std::shared_ptr<DirectMemory> register_memory(std::span<const DirectSpan>, DirectUse) override {
    struct Memory : DirectMemory {
      std::vector<std::byte> keys() const override { return {}; }
    };
    return std::make_shared<Memory>();
  }
  std::shared_ptr<RemoteMemory> remote_memory(std::span<const std::byte>) override {
    return std::make_shared<RemoteMemory>();
  }
  void write_direct(std::vector<DirectPiece> pieces, std::shared_ptr<DirectMemory>,
                    std::shared_ptr<RemoteMemory>, std::span<const std::byte>,
                    uint64_t token) override {
    for (const DirectPiece& piece : pieces) {
      for (uint64_t i = 0; i < piece.bytes; ++i) last = piece.source[i];
    }
    sink_->on_written(*this, token, true);
  }
  void close(const std::string&) override { closed = true; }
  std::string describe() const override { return "fake"; }

  LinkSink& sink() { return *sink_; }
  std::atomic<bool> closed = false;
  std::atomic<uint64_t> sent = 0;
  volatile std::byte last{};

 private:
  const bool one_sided_, direct_;
  mutable std::vector<std::byte> arena_;
  LinkSink* sink_ = nullptr;
};

// One agent for all inputs, each of which is a peer of its own.
struct Victim {
  Victim() : memory(size_t{1} << 16) {
    AgentOptions options;
    options.name = "victim";
    options.arena_bytes = 1u << 20;
    options.slot_bytes = 64u << 10;
    options.inline_bytes = 1u << 30;
    options.path = Path::kDirect;
    options.heartbeat_interval = 1000;
    options.heartbeat_timeout = 1e6;
    agent = std::make_unique<Agent>(options);
    layout.num_blocks = 16;
    layout.block_size = 16;
    layout.num_heads = 4;
    layout.layers = {"a"};
    layout.planes = {{"k", 16}};
    layout.views = {{memory.data(), 16 * 4 * 32, 16 * 32, 32, 2}};
    cache = agent->register_cache(layout);
  }
  OfferSpec offer() const {
    OfferSpec spec;
    spec.id = "x";
    spec.generation[0] = std::byte{1};
    for (int i = 0; i < 8; ++i) spec.generation[8 + i] = static_cast<std::byte>(count >> (8 * i));
    spec.cache = cache;
    spec.table.blocks = {1, 2};
    spec.num_tokens = 32;
    return spec;
  }

  std::vector<std::byte> memory;
  CacheLayout layout;
  std::unique_ptr<Agent> agent;
  CacheId cache = 0;
  uint64_t count = 0;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static Victim& victim = *new Victim;  // its threads end with the process
  if (size < 2) return 0;
  ++victim.count;
  const bool inbound = data[0] & 1, one_sided = data[0] & 2;
  const bool direct = one_sided && data[0] & 8;
  const PeerId peer = victim.agent->add_peer("them");
  auto link = std::make_shared<FakeLink>(one_sided, direct);
  victim.agent->attach(peer, link, 7, inbound, "fuzz");
  const auto say = [&](std::span<const std::byte> message) {
    if (!link->closed) link->sink().on_message(*link, message);
  };
  // Memory is registered on another thread: then there is something to say.
  const auto wait_for_answer = [&](uint64_t before) {
    for (int i = 0; i < 1000 && link->sent == before && !link->closed; ++i) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  };
  say(wire::Hello{wire::kProtocolVersion, 7, "them", 64u << 10,
                  31 | (direct ? wire::kDirectBit : 0)}
          .encode());
  std::vector<Offer> offers;
  std::vector<Fetch> fetches;
  if (inbound) {
    offers.push_back(victim.agent->offer(victim.offer()));
  } else {
    FetchSpec spec;
    spec.offer_id = "x";
    spec.cache = victim.cache;
    spec.table.blocks = {1, 2};
    spec.num_tokens = 32;
    spec.parts = {{peer, {0}, 0, 4}};
    spec.codec.codec = data[0] & 4 ? Codec::kInt8 : Codec::kRaw;
    const uint64_t before = link->sent;
    fetches.push_back(victim.agent->fetch(spec));
    if (direct) wait_for_answer(before + 1);  // RENEW is said at once
  }
  // Records of a length byte and a message; the generation of the offer is put where asked for.
  for (size_t at = 1; at < size;) {
    const size_t said = data[at++];
    const size_t length = std::min(said, size - at);
    std::vector<std::byte> message(length);
    for (size_t i = 0; i < length; ++i) message[i] = std::byte{data[at + i]};
    at += length;
    const bool asks = length > 33 && (message[0] == std::byte{3} || message[0] == std::byte{18});
    if (inbound && asks && message[9] == std::byte{1}) {
      const auto generation = victim.offer().generation;
      std::copy(generation.begin(), generation.end(), message.begin() + 14);
    }
    const bool lands = length > 0 && message[0] == std::byte{5} && !inbound;
    if (lands && direct) {
      if (!link->closed) link->sink().on_landed(*link, message, true);
    } else if (one_sided || !lands) {
      const uint64_t before = link->sent;
      say(message);
      if (direct && asks) wait_for_answer(before);
    } else if (!link->closed) {
      std::byte* room = link->sink().on_incoming(*link, 0, 64, message);
      if (room != nullptr) std::fill(room, room + 64, std::byte{1});
      if (!link->closed) link->sink().on_landed(*link, message, room != nullptr);
    }
  }
  link->sink().on_closed(*link, "the input is over");
  for (Offer& offer : offers) {
    offer.release();
    check(offer.wait(10), "an offer was not released");
  }
  for (Fetch& fetch : fetches) {
    fetch.cancel();
    check(fetch.done(), "a fetch has not ended");
  }
  const AgentStats stats = victim.agent->stats();
  check(stats.serving == 0 && stats.fetches == 0 && stats.offers == 0, "something is left");
  check(stats.free_slots == stats.slots, "a slot is lost");
  return 0;
}
