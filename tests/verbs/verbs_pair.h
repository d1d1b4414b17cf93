#ifndef KVXFER_TESTS_VERBS_PAIR_H_
#define KVXFER_TESTS_VERBS_PAIR_H_

#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "kvxfer/verbs.h"
#include "link_pair.h"
#include "verbs_world.h"

namespace kvxfer::testing {

inline Bytes random_bytes(size_t size, uint32_t seed) {
  Bytes bytes(size);
  uint32_t state = seed * 2654435761u + 1;
  for (auto& byte : bytes) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<std::byte>(state >> 24);
  }
  return bytes;
}

// Both ends of a verbs link. What the fake adapters saw is checked at the end.
struct VerbsPair {
  explicit VerbsPair(const VerbsOptions& consumer_options = options_for(true),
                     const VerbsOptions& producer_options = options_for(false),
                     size_t arena_bytes = 8u << 20)
      : arena(arena_bytes) {
    consumer_fabric = std::make_unique<VerbsFabric>(consumer_threads, consumer_options);
    producer_fabric = std::make_unique<VerbsFabric>(producer_threads, producer_options);
    arena_memory =
        consumer_fabric->register_memory({arena.data(), arena.size()}, VerbsAccess::kArena);
    connect();
  }

  void connect() {
    VerbsEndpoint consumer_end(*consumer_fabric, arena_memory);
    VerbsEndpoint producer_end(*producer_fabric, nullptr);
    const Bytes consumer_address = consumer_end.address();
    const Bytes producer_address = producer_end.address();
    const auto [p, c] = tcp_pair(false);
    consumer = make_verbs_link(consumer_threads, c, std::move(consumer_end), producer_address);
    producer = make_verbs_link(producer_threads, p, std::move(producer_end), consumer_address);
  }

  ~VerbsPair() {
    close();
    if (real_devices()) return;
    CHECK(fake_verbs::counts().overruns == 0);
    CHECK_MESSAGE(fake_verbs::counts().violations == 0, fake_verbs::last_violation());
  }

  void start() {
    producer->start(producer_sink);
    consumer->start(consumer_sink);
    started = true;
  }

  void close() {
    if (producer) producer->close("the test is over");
    if (consumer) consumer->close("the test is over");
    if (std::exchange(started, false)) {
      CHECK(producer_sink.wait_closed());
      CHECK(consumer_sink.wait_closed());
    }
    producer.reset();
    consumer.reset();
  }

  // Waits until `count` writes have landed and as many were reported as written.
  bool wait_written(size_t count) {
    return producer_sink.wait([&] { return producer_sink.written.size() >= count; });
  }
  bool wait_landed(size_t count) {
    return consumer_sink.wait([&] { return consumer_sink.landed.size() >= count; });
  }

  Arena arena;
  Recorder producer_sink, consumer_sink;
  IoThreads producer_threads{2}, consumer_threads{2};
  std::unique_ptr<VerbsFabric> producer_fabric, consumer_fabric;
  std::shared_ptr<VerbsMemory> arena_memory;
  std::shared_ptr<Link> producer, consumer;
  bool started = false;
};

// Writes into the slots of a pair's arena from several threads, each slot again only after what was
// in it has been compared, as an engine does it.
class Traffic {
 public:
  Traffic(VerbsPair& pair, uint32_t writes, size_t slot_bytes, uint32_t seed = 11)
      : pair_(pair),
        writes_(writes),
        slot_bytes_(slot_bytes),
        pattern_(random_bytes(slot_bytes + writes, seed)) {
    const auto slots = static_cast<uint32_t>(pair.arena.size() / slot_bytes);
    for (uint32_t i = 0; i < slots; ++i) free_slots_.push_back(i);
    seen_.resize(writes);
    pair.consumer_sink.landed_hook = [this](std::span<const std::byte> bytes, bool accepted) {
      landed(bytes, accepted);
    };
  }

  // Call before start(); sources are then registered once, as staging memory is.
  void register_sources() {
    memory_ = pair_.producer_fabric->register_memory(pattern_, VerbsAccess::kSource);
  }

  // Every write, from this thread. `between` is called before each. False: slots ran out.
  bool run(const std::function<void(uint32_t)>& between = {}) {
    for (uint32_t id = next_++; id < writes_; id = next_++) {
      if (between) between(id);
      const size_t size = id % 7 == 0 ? id % 100 : slot_bytes_ - id % 4000;
      Notice notice{id, 0, static_cast<uint32_t>(size)};
      {
        std::unique_lock lock(mutex_);
        if (!wait_running(freed_, lock, std::chrono::seconds(30),
                          [&] { return !free_slots_.empty(); })) {
          return false;
        }
        notice.slot = free_slots_.back();
        free_slots_.pop_back();
      }
      Bytes bytes(sizeof(notice) + id % 40);
      std::memcpy(bytes.data(), &notice, sizeof(notice));
      pair_.producer->write({pattern_.data() + id, size}, notice.slot * slot_bytes_, bytes, id);
    }
    return true;
  }

  bool wait() {
    std::unique_lock lock(mutex_);
    return wait_running(freed_, lock, std::chrono::seconds(60),
                        [&] { return right_ == writes_; }) &&
           pair_.wait_written(writes_);
  }

  uint32_t wrong() {
    const std::lock_guard lock(mutex_);
    return wrong_;
  }
  uint32_t right() {
    const std::lock_guard lock(mutex_);
    return right_;
  }
  uint32_t repeated() {
    const std::lock_guard lock(mutex_);
    return repeated_;
  }

 private:
  struct Notice {
    uint32_t id, slot, size;
  };

  void landed(std::span<const std::byte> bytes, bool accepted) {
    Notice notice{};
    bool same = accepted && bytes.size() >= sizeof(notice);
    if (same) {
      std::memcpy(&notice, bytes.data(), sizeof(notice));
      same = notice.id < writes_ &&
             std::memcmp(pattern_.data() + notice.id,
                         pair_.arena.data() + notice.slot * slot_bytes_, notice.size) == 0;
    }
    if (same) std::memset(pair_.arena.data() + notice.slot * slot_bytes_, 0x5a, slot_bytes_);
    const std::lock_guard lock(mutex_);
    ++(same ? right_ : wrong_);
    if (same && seen_[notice.id]++) ++repeated_;
    free_slots_.push_back(notice.slot);
    freed_.notify_all();
  }

  VerbsPair& pair_;
  const uint32_t writes_;
  const size_t slot_bytes_;
  Bytes pattern_;  // each write has its own part
  std::shared_ptr<VerbsMemory> memory_;
  std::atomic<uint32_t> next_{0};

  std::mutex mutex_;
  std::condition_variable freed_;
  std::vector<uint32_t> free_slots_;  // guarded by mutex_
  std::vector<int> seen_;             // guarded by mutex_
  uint32_t wrong_ = 0, right_ = 0, repeated_ = 0;
};

// Everything lands once, intact.
inline void check_traffic(VerbsPair& pair, uint32_t writes = 400, size_t slot_bytes = 1u << 20,
                          const std::function<void(uint32_t)>& between = {}) {
  Traffic traffic(pair, writes, slot_bytes);
  traffic.register_sources();
  pair.start();
  const bool all = traffic.run(between) && traffic.wait();
  CHECK_MESSAGE(all, pair.producer->describe());
  CHECK_MESSAGE(pair.producer_sink.times_closed() == 0, pair.producer_sink.closed[0]);
  CHECK(traffic.wrong() == 0);
  CHECK(traffic.right() == writes);
  CHECK(traffic.repeated() == 0);
  for (const auto& written : pair.producer_sink.written) CHECK(written.ok);
  pair.close();
}

}  // namespace kvxfer::testing

#endif  // KVXFER_TESTS_VERBS_PAIR_H_
