// verbs_writes CONSUMER_DEVICES PRODUCER_DEVICES SIZE WINDOW QUEUE_PAIRS RUNS: writes of the verbs
// transport between the two ends of a link, both in this process.
//
// Reads commands, one a line, and answers each with a line of JSON:
//   run N    N writes of RUNS times SIZE bytes, WINDOW of them under way, each at a place of its
//   own
//            in the window: {"seconds": s, "link": "what the producer's end says about itself"}.
//            With more than one run they are written as the direct path does it, with one notice.
//   check    as `run WINDOW` into cleared memory, which is compared: {"wrong": places that differ}

#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <iostream>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kvxfer/verbs.h"

namespace {

using kvxfer::Link;
using Bytes = std::vector<std::byte>;

class Sink final : public kvxfer::LinkSink {
 public:
  void on_message(Link&, std::span<const std::byte>) override {}
  std::byte* on_incoming(Link&, uint64_t, uint64_t, std::span<const std::byte>) override {
    return nullptr;
  }
  void on_landed(Link&, std::span<const std::byte>, bool) override { count(true, landed_); }
  void on_written(Link&, uint64_t, bool ok) override {
    if (ok && next) next();
    count(ok, written_);
  }
  void on_closed(Link&, const std::string& reason) override {
    const std::lock_guard lock(mutex_);
    reason_ = reason;
    closed_ = true;
    changed_.notify_all();
  }

  std::function<void()> next;  // for each write that is done

  void wait_written(uint64_t count) { wait(written_, count); }
  void wait_landed(uint64_t count) { wait(landed_, count); }
  void wait_closed() {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(10), [&] { return closed_; });
  }

 private:
  void count(bool ok, uint64_t& counter) {
    const std::lock_guard lock(mutex_);
    failed_ |= !ok;
    if (++counter >= waited_for_) changed_.notify_all();
  }
  void wait(const uint64_t& counter, uint64_t count) {
    std::unique_lock lock(mutex_);
    waited_for_ = count;
    changed_.wait_for(lock, std::chrono::seconds(60),
                      [&] { return counter >= count || failed_ || closed_; });
    if (counter < count) throw std::runtime_error("a write did not arrive: " + reason_);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t written_ = 0, landed_ = 0, waited_for_ = 0;
  bool failed_ = false, closed_ = false;
  std::string reason_;
};

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

class Bench {
 public:
  Bench(const std::string& consumer_devices, const std::string& producer_devices, size_t size,
        uint64_t window, uint32_t queue_pairs, size_t runs)
      : run_bytes_(size),
        size_(size * runs),
        window_(window),
        arena_(size_ * window),
        source_(size_ * window) {
    uint32_t state = 1;
    for (auto& byte : source_) {
      state = state * 1664525u + 1013904223u;
      byte = static_cast<std::byte>(state >> 24);
    }
    kvxfer::VerbsOptions options;
    options.queue_pairs = queue_pairs;
    options.devices = split(consumer_devices);
    kvxfer::VerbsFabric consumer_fabric(threads_, options);
    options.devices = split(producer_devices);
    kvxfer::VerbsFabric producer_fabric(threads_, options);
    registered_ = producer_fabric.register_memory(source_, kvxfer::VerbsAccess::kSource);
    kvxfer::VerbsEndpoint consumer_end(
        consumer_fabric, consumer_fabric.register_memory(arena_, kvxfer::VerbsAccess::kArena));
    kvxfer::VerbsEndpoint producer_end(producer_fabric, nullptr);
    const auto consumer_address = consumer_end.address();
    const auto producer_address = producer_end.address();
    int sockets[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) {
      throw std::runtime_error("no socket pair");
    }
    consumer_ = make_verbs_link(threads_, sockets[0], std::move(consumer_end), producer_address);
    producer_ = make_verbs_link(threads_, sockets[1], std::move(producer_end), consumer_address);
    producer_sink_.next = [this] { write_next(); };
    consumer_->start(consumer_sink_);
    producer_->start(producer_sink_);
    if (runs == 1) return;
    const std::span<std::byte> arena(arena_), source(source_);
    to_ = consumer_->register_memory({&arena, 1}, Link::DirectUse::kTarget);
    from_ = producer_->register_memory({&source, 1}, Link::DirectUse::kSource);
    remote_ = producer_->remote_memory(to_->keys());
  }
  ~Bench() {
    producer_->close("done");
    consumer_->close("done");
    producer_sink_.wait_closed();
    consumer_sink_.wait_closed();
  }

  double run(uint64_t writes) {
    const auto begin = std::chrono::steady_clock::now();
    end_ += writes;
    for (uint64_t i = 0; i < std::min(writes, window_); ++i) write_next();
    producer_sink_.wait_written(end_);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  uint64_t check() {
    std::fill(arena_.begin(), arena_.end(), std::byte{});
    run(window_);
    consumer_sink_.wait_landed(end_);
    uint64_t wrong = 0;
    for (size_t i = 0; i < window_; ++i) {
      const auto at = static_cast<ptrdiff_t>(i * size_);
      const auto end = at + static_cast<ptrdiff_t>(size_);
      wrong += !std::equal(arena_.begin() + at, arena_.begin() + end, source_.begin() + at);
    }
    return wrong;
  }

  std::string describe() const { return producer_->describe(); }

 private:
  void write_next() {
    uint64_t id = next_;
    do {
      if (id >= end_) return;
    } while (!next_.compare_exchange_weak(id, id + 1));
    const size_t at = id % window_ * size_;
    if (!from_) return producer_->write({source_.data() + at, size_}, at, {}, id);
    std::vector<kvxfer::DirectPiece> pieces;
    for (size_t i = at; i < at + size_; i += run_bytes_) {
      pieces.push_back({source_.data() + i, i, run_bytes_});
    }
    producer_->write_direct(std::move(pieces), from_, remote_, {}, id);
  }

  const size_t run_bytes_, size_;
  const uint64_t window_;
  Bytes arena_, source_;
  uint64_t end_ = 0;
  std::atomic<uint64_t> next_{0};
  Sink consumer_sink_, producer_sink_;
  kvxfer::IoThreads threads_{2};
  std::shared_ptr<kvxfer::VerbsMemory> registered_;
  std::shared_ptr<Link> consumer_, producer_;
  std::shared_ptr<kvxfer::DirectMemory> from_, to_;
  std::shared_ptr<kvxfer::RemoteMemory> remote_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 7) {
    std::cerr
        << "usage: verbs_writes CONSUMER_DEVICES PRODUCER_DEVICES SIZE WINDOW QUEUE_PAIRS RUNS\n";
    return 2;
  }
  try {
    Bench bench(argv[1], argv[2], std::stoull(argv[3]), std::stoull(argv[4]),
                static_cast<uint32_t>(std::stoul(argv[5])), std::stoull(argv[6]));
    for (std::string line; std::getline(std::cin, line);) {
      if (line == "check") {
        std::cout << "{\"wrong\": " << bench.check() << "}" << std::endl;
      } else if (line.starts_with("run ")) {
        const double seconds = bench.run(std::stoull(line.substr(4)));
        std::cout << "{\"seconds\": " << seconds << ", \"link\": \"" << bench.describe() << "\"}"
                  << std::endl;
      } else {
        std::cerr << "verbs_writes: unknown command '" << line << "'\n";
        return 2;
      }
    }
  } catch (const std::exception& error) {
    std::cerr << "verbs_writes: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
