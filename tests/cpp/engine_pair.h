#ifndef KVXFER_TESTS_ENGINE_PAIR_H_
#define KVXFER_TESTS_ENGINE_PAIR_H_

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "kvxfer/agent.h"
#include "link_pair.h"

namespace kvxfer::testing {

enum class Order { kHeadMajor, kTokenMajor };

// Paged memory of a small model: separate K and V planes in one allocation, bfloat16.
struct TestCache {
  TestCache(uint32_t layers, uint32_t blocks, uint32_t block_size, Order order)
      : num_blocks(blocks),
        memory(size_t{layers} * 2 * blocks * block_size * kHeads * kContent * 2) {
    layout.num_blocks = blocks;
    layout.block_size = block_size;
    layout.num_heads = kHeads;
    layout.planes = {{"k", kContent}, {"v", kContent}};
    const int64_t row = kContent * 2, block = row * kHeads * block_size;
    for (uint32_t layer = 0; layer < layers; ++layer) {
      layout.layers.push_back("layer." + std::to_string(layer));
      for (int plane = 0; plane < 2; ++plane) {
        std::byte* data = memory.data() + (layer * 2 + plane) * block * blocks;
        layout.views.push_back(order == Order::kHeadMajor
                                   ? PlaneView{data, block, row * block_size, row, 2}
                                   : PlaneView{data, block, row, row * kHeads, 2});
      }
    }
  }

  std::byte* row(uint32_t layer, uint32_t plane, uint32_t block, uint32_t head, uint32_t slot) {
    const PlaneView& view = layout.view(layer, plane);
    return view.data + block * view.block_stride + head * view.head_stride +
           slot * view.token_stride;
  }

  void fill(uint32_t seed) {
    std::mt19937_64 random(seed);
    for (size_t i = 0; i + 8 <= memory.size(); i += 8) {
      const uint64_t word = random();
      std::memcpy(memory.data() + i, &word, 8);
    }
  }
  // With numbers of +-0.5 to +-2 in bfloat16.
  void fill_tame(uint32_t seed) {
    std::mt19937 random(seed);
    for (size_t i = 0; i + 2 <= memory.size(); i += 2) {
      const uint16_t bits = 0x3f00 | (random() & 0x80ff);
      std::memcpy(memory.data() + i, &bits, 2);
    }
  }
  void poison() { std::fill(memory.begin(), memory.end(), std::byte{0xee}); }

  static constexpr uint32_t kHeads = 4, kContent = 32;
  uint32_t num_blocks;
  std::vector<std::byte> memory;
  CacheLayout layout;
};

inline bool same_tokens(TestCache& a, const std::vector<uint32_t>& a_blocks, TestCache& b,
                        const std::vector<uint32_t>& b_blocks, uint32_t tokens) {
  for (uint32_t layer = 0; layer < a.layout.layers.size(); ++layer) {
    for (uint32_t plane = 0; plane < 2; ++plane) {
      for (uint32_t head = 0; head < TestCache::kHeads; ++head) {
        for (uint32_t token = 0; token < tokens; ++token) {
          const uint32_t as = a.layout.block_size, bs = b.layout.block_size;
          if (std::memcmp(a.row(layer, plane, a_blocks[token / as], head, token % as),
                          b.row(layer, plane, b_blocks[token / bs], head, token % bs),
                          TestCache::kContent * 2) != 0) {
            return false;
          }
        }
      }
    }
  }
  return true;
}

inline Generation generation_of(uint64_t number) {
  Generation generation{};
  std::memcpy(generation.data(), &number, sizeof(number));
  return generation;
}

inline AgentOptions options_of(const std::string& name, uint64_t incarnation, uint32_t slots = 16) {
  AgentOptions options;
  options.name = name;
  options.incarnation = incarnation;
  options.slot_bytes = 64u << 10;
  options.arena_bytes = uint64_t{slots} * options.slot_bytes;
  options.threads = 2;
  options.inline_bytes = 4096;
  options.heartbeat_interval = 0.05;
  options.heartbeat_timeout = 5;
  return options;
}

inline std::vector<std::string> engine_transports() {
  std::vector<std::string> names{"loopback", "shm", "tcp"};
  for (const auto& [name, maker] : further_transports()) names.push_back(name);
  return names;
}

// A producer and a consumer, linked over the named transport.
struct Pair {
  explicit Pair(const std::string& transport, const LoopbackFaults& faults = {},
                uint32_t slots = 16)
      : producer(options_of("prefill", 1)), consumer(options_of("decode", 2, slots)) {
    to_producer = consumer.add_peer("prefill");
    const PeerId to_consumer = producer.add_peer("decode");
    std::shared_ptr<Link> ours, theirs;
    if (transport == "loopback") {
      std::tie(theirs, ours) = make_loopback_pair(producer.io(), consumer.io(), faults);
    } else if (transport == "shm") {
      const auto [p, c] = unix_pair();
      const int arena = ::fcntl(consumer.arena_fd(), F_DUPFD_CLOEXEC, 0);
      theirs = make_shm_link(producer.io(), p, arena, consumer.arena_bytes());
      ours = make_shm_link(consumer.io(), c, -1, 0);
    } else if (const auto maker = further_transports().find(transport);
               maker != further_transports().end()) {
      std::tie(theirs, ours) = maker->second(producer.io(), consumer.io(), consumer.arena().bytes);
    } else {
      const auto [p, c] = tcp_pair(false);
      std::vector<int> producer_data, consumer_data;
      for (int i = 0; i < 2; ++i) {
        const auto [a, b] = tcp_pair(false);
        producer_data.push_back(a);
        consumer_data.push_back(b);
      }
      theirs = make_tcp_link(producer.io(), p, producer_data);
      ours = make_tcp_link(consumer.io(), c, consumer_data);
    }
    producer.attach(to_consumer, theirs, 2, true, "test");
    consumer.attach(to_producer, ours, 1, false, "test");
  }

  Offer offer(CacheId cache, const std::vector<uint32_t>& blocks, uint32_t tokens, uint64_t number,
              bool ready = true) {
    return producer.offer({"request-" + std::to_string(number),
                           generation_of(number),
                           cache,
                           {blocks, 0, 0},
                           tokens,
                           30.0,
                           1,
                           ready});
  }
  Fetch fetch(CacheId cache, TestCache& into, const std::vector<uint32_t>& blocks, uint32_t tokens,
              uint64_t number, double timeout = 20.0, const CodecSpec& codec = {}) {
    FetchSpec spec{"request-" + std::to_string(number),
                   generation_of(number),
                   cache,
                   {blocks, 0, 0},
                   tokens,
                   timeout,
                   {},
                   codec};
    FetchPart part{to_producer, {}, 0, TestCache::kHeads};
    for (uint32_t layer = 0; layer < into.layout.layers.size(); ++layer)
      part.layers.push_back(layer);
    spec.parts = {part};
    return consumer.fetch(spec);
  }

  Agent producer, consumer;
  PeerId to_producer = 0;
};

inline std::vector<uint32_t> take_blocks(std::mt19937& random, uint32_t num_blocks,
                                         uint32_t count) {
  std::vector<uint32_t> all(num_blocks);
  for (uint32_t i = 0; i < num_blocks; ++i) all[i] = i;
  std::shuffle(all.begin(), all.end(), random);
  all.resize(count);
  return all;
}

inline bool eventually(const std::function<bool()>& condition) {
  for (int i = 0; i < 1000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

}  // namespace kvxfer::testing

#endif  // KVXFER_TESTS_ENGINE_PAIR_H_
