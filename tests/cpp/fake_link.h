#ifndef KVXFER_TESTS_FAKE_LINK_H_
#define KVXFER_TESTS_FAKE_LINK_H_

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "kvxfer/transport.h"
#include "wire/messages.h"

namespace kvxfer::testing {

// Says whatever a test wants, and records what the agent answers.
class FakeLink : public Link {
 public:
  explicit FakeLink(bool one_sided, size_t mapped = 0) : one_sided_(one_sided), arena_(mapped) {}

  const char* transport() const override { return "fake"; }
  void start(LinkSink& sink) override { sink_ = &sink; }
  void send(std::span<const std::byte> message) override {
    const wire::Bytes copy(message.begin(), message.end());
    {
      const std::lock_guard lock(mutex_);
      if (closed()) return;
      sent.push_back(copy);
    }
    if (on_send) on_send(copy);
  }
  bool one_sided() const override { return one_sided_; }
  std::span<std::byte> mapped_arena() const override { return {arena_.data(), arena_.size()}; }
  void write(std::span<const std::byte>, uint64_t, std::span<const std::byte>,
             uint64_t token) override {
    if (!writes_take_long) return sink_->on_written(*this, token, true);
    under_way = token;
  }
  bool direct() const override { return allows_direct; }
  std::shared_ptr<DirectMemory> register_memory(std::span<const DirectSpan>, DirectUse) override {
    ++registrations;
    if (on_register) on_register();
    auto memory = std::make_shared<Memory>();
    memory->on_drop = on_drop;
    return memory;
  }
  std::shared_ptr<RemoteMemory> remote_memory(std::span<const std::byte>) override {
    return std::make_shared<RemoteMemory>();
  }
  void write_direct(std::vector<DirectPiece> pieces, std::shared_ptr<DirectMemory>,
                    std::shared_ptr<RemoteMemory>, std::span<const std::byte>,
                    uint64_t token) override {
    {
      const std::lock_guard lock(mutex_);
      written.insert(written.end(), pieces.begin(), pieces.end());
    }
    if (!writes_take_long) return sink_->on_written(*this, token, true);
    under_way = token;
  }
  std::string gpu_ipc_problem() const override { return gpu_problem; }
  void let_go_of_gpus() override { ++let_go; }
  void close(const std::string& why) override {
    if (closed_) return;
    reason = why;
    closed_ = true;
  }
  std::string describe() const override { return "fake"; }

  void say(const wire::Bytes& message) {
    if (!closed()) sink_->on_message(*this, message);
  }
  void land(const wire::Bytes& notice) { sink_->on_landed(*this, notice, true); }
  // Writes as over a transport that asks where to; says whether the agent took it.
  bool write_in(uint64_t offset, uint64_t size, const wire::Bytes& notice, std::byte value) {
    if (closed()) return false;
    std::byte* room = sink_->on_incoming(*this, offset, size, notice);
    if (room != nullptr) std::fill(room, room + size, value);
    if (!closed()) sink_->on_landed(*this, notice, room != nullptr);
    return room != nullptr;
  }
  void end_write() { sink_->on_written(*this, under_way.exchange(0), true); }
  void lose() { sink_->on_lost(*this, "its process may live on"); }
  void end() { sink_->on_closed(*this, "the test is over"); }
  bool closed() const { return closed_; }
  std::vector<wire::Bytes> heard() {
    const std::lock_guard lock(mutex_);
    return sent;
  }

  struct Memory : DirectMemory {
    ~Memory() override {
      if (on_drop) on_drop();
    }
    std::vector<std::byte> keys() const override { return {std::byte{7}}; }
    std::function<void()> on_drop;
  };

  bool allows_direct = false;
  std::string gpu_problem = "it is a fake";
  std::atomic<uint32_t> let_go = 0;
  std::atomic<uint32_t> registrations = 0;
  std::vector<DirectPiece> written;
  bool writes_take_long = false;        // until end_write()
  std::atomic<uint64_t> under_way = 0;  // the token of such a write
  std::function<void(const wire::Bytes&)> on_send;
  std::function<void()> on_register, on_drop;  // of memory, in the thread that does it
  std::vector<wire::Bytes> sent;
  std::string reason;  // why the agent closed it

 private:
  const bool one_sided_;
  mutable std::vector<std::byte> arena_;
  std::mutex mutex_;
  std::atomic<bool> closed_ = false;
  LinkSink* sink_ = nullptr;
};

}  // namespace kvxfer::testing

#endif  // KVXFER_TESTS_FAKE_LINK_H_
