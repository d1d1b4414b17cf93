#include <algorithm>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <random>
#include <utility>

#include "transport/common/link_base.h"

namespace kvxfer {
namespace {

// A held-back write is let go after this time if no other one comes to overtake it.
constexpr auto kLongestHold = std::chrono::milliseconds(20);

using Bytes = std::vector<std::byte>;

// Decides what goes wrong. Thread-safe; the same sequence of calls draws the same faults.
class FaultDice {
 public:
  FaultDice(const LoopbackFaults& faults, uint64_t stream)
      : faults_(faults), random_(faults.seed * 2 + stream) {}

  const LoopbackFaults& faults() const { return faults_; }

  bool roll(double probability) {
    if (probability <= 0) return false;
    const std::lock_guard lock(mutex_);
    return std::bernoulli_distribution(std::min(probability, 1.0))(random_);
  }

  uint64_t below(uint64_t end) {
    const std::lock_guard lock(mutex_);
    return std::uniform_int_distribution<uint64_t>(0, end - 1)(random_);
  }

 private:
  const LoopbackFaults faults_;
  std::mutex mutex_;
  std::mt19937_64 random_;  // guarded by mutex_
};

// One end of a pair. Messages are delivered by the receiving side's control loop, writes by its
// first bulk loop.
class LoopbackLink final : public LinkBase {
 public:
  LoopbackLink(IoThreads& threads, const LoopbackFaults& faults, uint64_t stream)
      : LinkBase(threads.control(), 1), bulk_(threads.bulk(0)), dice_(faults, stream) {}

  ~LoopbackLink() override {
    if (const auto peer = peer_.lock()) peer->lose("the peer dropped its end of the connection");
  }

  void join(const std::shared_ptr<LoopbackLink>& peer) { peer_ = peer; }

  const char* transport() const override { return "loopback"; }
  std::string describe() const override { return "loopback within the process"; }
  bool crosses_wire() const override { return dice_.faults().bytes_per_second > 0; }
  std::optional<double> rate() const override {
    const uint64_t paced = dice_.faults().bytes_per_second;
    return paced > 0 ? std::optional(static_cast<double>(paced)) : std::nullopt;
  }

  void send(std::span<const std::byte> message) override {
    const auto peer = peer_.lock();
    if (closing() || !peer) return;
    if (message.size() > kMaxMessage) {
      fail("a control message of " + std::to_string(message.size()) +
           " bytes is over the limit of " + std::to_string(kMaxMessage));
      return;
    }
    if (dice_.roll(dice_.faults().drop_message)) return;
    const int copies = dice_.roll(dice_.faults().duplicate_message) ? 2 : 1;
    for (int i = 0; i < copies; ++i) peer->arrive(Bytes(message.begin(), message.end()));
  }

  void write(std::span<const std::byte> source, uint64_t offset, std::span<const std::byte> notice,
             uint64_t token) override {
    if (source.size() > kMaxWrite || notice.size() > kMaxNotice) {
      fail("a write of " + std::to_string(source.size()) + " bytes with a notice of " +
           std::to_string(notice.size()) + " is over the limits");
    }
    if (!enter()) {
      sink().on_written(*this, token, false);
      return;
    }
    if (const auto peer = peer_.lock(); peer && !dice_.roll(dice_.faults().drop_write)) {
      auto write = copy(source, offset, notice);
      if (!write) {
        sink().on_written(*this, token, false);
        leave();
        fail("there was no memory for a copy of " + std::to_string(source.size()) + " bytes");
        return;
      }
      launch(*peer, std::move(write));
    }
    sink().on_written(*this, token, true);
    leave();
  }

 protected:
  void begin() override {
    const std::lock_guard lock(mutex_);
    started_ = true;
    for (Bytes& message : early_) deliver(std::move(message));
    early_ = {};
    for (auto& [write, flip] : early_writes_) {
      bulk_->post([self = shared_from_this(), this, write = std::move(write), flip = flip] {
        land(write, flip);
      });
    }
    early_writes_ = {};
  }

  void shut() override {
    if (const auto peer = peer_.lock()) peer->lose("the peer closed the connection");
    control().post([self = shared_from_this()] { static_cast<LoopbackLink&>(*self).leave(); });
  }

 private:
  struct Write {
    Bytes bytes;
    Bytes notice;
    uint64_t offset = 0;
  };

  // Null where memory is short: who writes is a packing thread, on which nobody catches.
  static std::shared_ptr<Write> copy(std::span<const std::byte> source, uint64_t offset,
                                     std::span<const std::byte> notice) {
    try {
      return std::make_shared<Write>(
          Write{{source.begin(), source.end()}, {notice.begin(), notice.end()}, offset});
    } catch (const std::bad_alloc&) {
      return nullptr;
    }
  }

  // A message from the peer. Those that come before start() wait for it.
  void arrive(Bytes message) {
    const std::lock_guard lock(mutex_);
    if (started_) {
      deliver(std::move(message));
    } else {
      early_.push_back(std::move(message));
    }
  }

  void deliver(Bytes message) {
    control().post([self = shared_from_this(), this, message = std::move(message)] {
      if (!enter()) return;
      sink().on_message(*this, message);
      leave();
    });
  }

  // Behind the messages that are on their way.
  void lose(const char* reason) {
    control().post([self = shared_from_this(), this, reason] { fail(reason); });
  }

  // Sends one write on its way, and the one that was held back behind it.
  void launch(LoopbackLink& peer, std::shared_ptr<Write> write) {
    const LoopbackFaults& faults = dice_.faults();
    std::shared_ptr<Write> overtaken;
    {
      const std::lock_guard lock(mutex_);
      overtaken = std::exchange(held_, nullptr);
    }
    if (dice_.roll(faults.reorder_write)) {
      {
        const std::lock_guard lock(mutex_);
        held_ = write;
      }
      peer.bulk_->post_at(Clock::now() + kLongestHold, [weak = weak<LoopbackLink>(), write] {
        if (const auto self = weak.lock()) self->release(write);
      });
    } else {
      fly(peer, write);
      if (dice_.roll(faults.duplicate_write)) fly(peer, write);
    }
    if (overtaken) fly(peer, overtaken);
  }

  void release(const std::shared_ptr<Write>& write) {
    {
      const std::lock_guard lock(mutex_);
      if (held_ != write) return;
      held_ = nullptr;
    }
    if (const auto peer = peer_.lock()) fly(*peer, write);
  }

  void fly(LoopbackLink& peer, const std::shared_ptr<Write>& write) {
    const uint32_t delay = dice_.faults().delay_us;
    const uint64_t flip = dice_.roll(dice_.faults().corrupt_write) && !write->bytes.empty()
                              ? dice_.below(write->bytes.size() * 8) + 1
                              : 0;
    auto land = [weak = peer.weak<LoopbackLink>(), write, flip] {
      if (const auto self = weak.lock()) self->land(write, flip);
    };
    TimePoint when = sent(write->bytes.size() + write->notice.size());
    if (delay > 0) when += std::chrono::microseconds(dice_.below(uint64_t{delay} + 1));
    if (when <= Clock::now()) {
      peer.bulk_->post(std::move(land));
    } else {
      peer.bulk_->post_at(when, std::move(land));
    }
  }

  // When a link of this rate would have sent so many bytes, one write after the other.
  TimePoint sent(uint64_t bytes) {
    const uint64_t rate = dice_.faults().bytes_per_second;
    const TimePoint now = Clock::now();
    if (rate == 0) return now;
    const auto takes = std::chrono::duration_cast<Duration>(
        std::chrono::duration<double>(static_cast<double>(bytes) / static_cast<double>(rate)));
    const std::lock_guard lock(mutex_);
    free_at_ = std::max(free_at_, now) + takes;
    return free_at_;
  }

  // On this end's bulk loop. `flip`: 1 + the bit to turn over, or 0.
  void land(const std::shared_ptr<Write>& write, uint64_t flip) {
    if (closing()) return;
    {
      const std::lock_guard lock(mutex_);
      if (!started_) {
        early_writes_.push_back({write, flip});
        return;
      }
    }
    if (!enter()) return;
    std::byte* to = sink().on_incoming(*this, write->offset, write->bytes.size(), write->notice);
    if (to) {
      std::copy(write->bytes.begin(), write->bytes.end(), to);
      if (flip) to[(flip - 1) / 8] ^= std::byte{1} << ((flip - 1) % 8);
    }
    sink().on_landed(*this, write->notice, to != nullptr);
    leave();
  }

  const std::shared_ptr<EventLoop> bulk_;
  FaultDice dice_;
  std::weak_ptr<LoopbackLink> peer_;  // set before the link is handed out

  std::mutex mutex_;
  bool started_ = false;                                                   // guarded by mutex_
  std::vector<Bytes> early_;                                               // guarded by mutex_
  std::vector<std::pair<std::shared_ptr<Write>, uint64_t>> early_writes_;  // guarded by mutex_
  std::shared_ptr<Write> held_;                                            // guarded by mutex_
  TimePoint free_at_{};                                                    // guarded by mutex_
};

}  // namespace

std::pair<std::shared_ptr<Link>, std::shared_ptr<Link>> make_loopback_pair(
    IoThreads& a, IoThreads& b, const LoopbackFaults& faults) {
  auto first = std::make_shared<LoopbackLink>(a, faults, 0);
  auto second = std::make_shared<LoopbackLink>(b, faults, 1);
  first->join(second);
  second->join(first);
  return {first, second};
}

}  // namespace kvxfer
