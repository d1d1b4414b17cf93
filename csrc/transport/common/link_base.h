#ifndef KVXFER_TRANSPORT_COMMON_LINK_BASE_H_
#define KVXFER_TRANSPORT_COMMON_LINK_BASE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "base/event_loop.h"
#include "kvxfer/transport.h"

namespace kvxfer {

// Counts who may still call a sink, so that on_closed() comes last. Whoever is about to call
// enters; once closed nobody new gets in, and the last to leave learns that it is the last.
// Lock-free.
class CloseGate {
 public:
  // `inside`: how many are inside from the beginning.
  explicit CloseGate(uint64_t inside) : state_(inside) {}

  bool enter() {
    uint64_t state = state_.load(std::memory_order_relaxed);
    do {
      if (state & kClosed) return false;
    } while (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel));
    return true;
  }

  // True for the one call after which nobody is inside a closed gate.
  bool leave() { return state_.fetch_sub(1, std::memory_order_acq_rel) == (kClosed | 1); }

  // True for the first call.
  bool close() { return !(state_.fetch_or(kClosed, std::memory_order_acq_rel) & kClosed); }

  bool closed() const { return state_.load(std::memory_order_acquire) & kClosed; }

 private:
  static constexpr uint64_t kClosed = uint64_t{1} << 63;
  std::atomic<uint64_t> state_;
};

// The closing protocol, the same for every transport of ours. A link has `parts`, e.g. sockets;
// each leaves once after shut(), when it will call the sink no more. When all have left and start()
// has been called, on_closed() is posted to the control loop.
//
// Handlers given to loops hold a weak_ptr to the link, locked while they run: so the last reference
// may be dropped anywhere, and the destructor may take the descriptors off the loops.
class LinkBase : public Link, public std::enable_shared_from_this<LinkBase> {
 public:
  void start(LinkSink& sink) final;
  void close(const std::string& reason) final { fail(reason); }

 protected:
  LinkBase(std::shared_ptr<EventLoop> control, uint64_t parts);

  // Begins to call the sink. Also called when the link was closed before it was started.
  virtual void begin() = 0;

  // Sees to it that each part leaves. Called once, from any thread, perhaps with the sink's owner's
  // locks held: so it waits for nothing and calls nobody.
  virtual void shut() = 0;

  // Closes the link unless it is closing. May be called from anywhere.
  void fail(const std::string& reason);

  bool enter() { return gate_.enter(); }
  void leave();
  bool closing() const { return gate_.closed(); }

  LinkSink& sink() const { return *sink_; }
  EventLoop& control() const { return *control_; }

  template <typename Derived>
  std::weak_ptr<Derived> weak() {
    return std::static_pointer_cast<Derived>(shared_from_this());
  }

 private:
  const std::shared_ptr<EventLoop> control_;
  LinkSink* sink_ = nullptr;
  CloseGate gate_;
  std::string reason_;  // written by whoever closed the gate, read when all have left
};

}  // namespace kvxfer

#endif  // KVXFER_TRANSPORT_COMMON_LINK_BASE_H_
