#ifndef KVXFER_ENGINE_GPU_GATE_H_
#define KVXFER_ENGINE_GPU_GATE_H_

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/thread.h"
#include "base/unique_here.h"
#include "device/gpu_event.h"

namespace kvxfer {

// Waits for events of GPUs on a thread of its own, which sleeps when there are none. It asks for
// them, as a callback in the stream would hold up the engine's work there: first every 20 us, then
// after an eighth of the time that the youngest has waited, up to a millisecond. That costs less
// than a hundredth of a core for one stream. Thread-safe.
class GpuGate {
 public:
  // Gets "" once the event has happened, else why it is not waited for any more. Must not throw.
  using Opened = std::function<void(const std::string& failure)>;

  ~GpuGate() { stop(); }

  // Starts the thread, which wait() needs. Idempotent. Throws Error(kNoResources).
  void start();
  // Calls `opened` later, on the gate's thread, by `deadline` at the latest. After stop(), never.
  void wait(std::shared_ptr<GpuEvent> event, TimePoint deadline, Opened opened);
  // Forgets what is waited for, and joins the thread. Idempotent. In a forked child it does
  // nothing.
  void stop() { stop_until(kNever); }
  // The same until `deadline`. False where a call of the driver has not come back by then: the
  // thread goes on by itself, to call nobody, and this object must stay for good.
  bool stop_until(TimePoint deadline);

 private:
  struct Waiting {
    std::shared_ptr<GpuEvent> event;
    TimePoint deadline;
    Opened opened;
    TimePoint since;
  };

  void run();
  bool is_stopped();

  std::mutex mutex_;
  const UniqueHere<std::condition_variable> changed_{new std::condition_variable};
  std::vector<Waiting> added_;
  bool stopped_ = false;
  bool running_ = false;
  const uint64_t generation_ = fork_generation();
  std::unique_ptr<Thread> thread_;
};

}  // namespace kvxfer

#endif  // KVXFER_ENGINE_GPU_GATE_H_
