#ifndef KVXFER_DEVICE_KERNEL_FIBERS_H_
#define KVXFER_DEVICE_KERNEL_FIBERS_H_

#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <vector>

namespace kvxfer::gpu {

// Runs a kernel on the CPU, one workgroup at a time, its threads as fibers of this thread. Waves
// run in an order that changes from group to group, so that what works by luck fails some time.
// Threads that wait for a barrier that others never reach end the program with a message.
class Fibers {
 public:
  Fibers(uint32_t threads, uint32_t wave) : wave_(wave), fibers_(threads), values_(threads) {
    for (Fiber& fiber : fibers_) fiber.stack = std::make_unique<char[]>(kStackBytes);
  }

  static Fibers& current() { return *active(); }

  void launch(uint32_t groups_x, uint32_t groups_y, const std::function<void()>& kernel) {
    kernel_ = &kernel;
    active() = this;
    for (group_y_ = 0; group_y_ < groups_y; ++group_y_) {
      for (group_x_ = 0; group_x_ < groups_x; ++group_x_) run_group();
    }
    active() = nullptr;
  }

  uint32_t thread() const { return running_; }
  uint32_t group_x() const { return group_x_; }
  uint32_t group_y() const { return group_y_; }

  void barrier() { wait(0, static_cast<uint32_t>(fibers_.size()), Wait::kGroup); }

  uint32_t shuffle_xor(uint32_t value, uint32_t mask) {
    const uint32_t first = running_ / wave_ * wave_;
    values_[running_] = value;
    wait(first, first + wave_, Wait::kWave);
    const uint32_t result = values_[running_ ^ mask];
    wait(first, first + wave_, Wait::kWave);  // until all have read
    return result;
  }

 private:
  enum class Wait : uint8_t { kNone, kGroup, kWave, kEnded };
  struct Fiber {
    std::unique_ptr<char[]> stack;
    ucontext_t context;
    Wait wait = Wait::kNone;
  };
  static constexpr size_t kStackBytes = 64 << 10;

  static Fibers*& active() {
    static Fibers* fibers = nullptr;
    return fibers;
  }

  static void enter() {
    Fibers& self = current();
    (*self.kernel_)();
    self.fibers_[self.running_].wait = Wait::kEnded;
    swapcontext(&self.fibers_[self.running_].context, &self.scheduler_);
    std::terminate();
  }

  void wait(uint32_t begin, uint32_t end, Wait kind) {
    fibers_[running_].wait = kind;
    bool all = true;
    for (uint32_t i = begin; i < end; ++i) all = all && fibers_[i].wait == kind;
    if (all) {
      for (uint32_t i = begin; i < end; ++i) fibers_[i].wait = Wait::kNone;
    } else {
      swapcontext(&fibers_[running_].context, &scheduler_);
    }
  }

  void run_group() {
    const auto count = static_cast<uint32_t>(fibers_.size());
    for (Fiber& fiber : fibers_) {
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = kStackBytes;
      fiber.context.uc_link = nullptr;
      fiber.wait = Wait::kNone;
      makecontext(&fiber.context, &Fibers::enter, 0);
    }
    const uint32_t turn = (group_x_ * 7 + group_y_ * 3) * wave_;
    for (uint32_t ended = 0; ended < count;) {
      bool moved = false;
      ended = 0;
      for (uint32_t i = 0; i < count; ++i) {
        running_ = (i + turn) % count;
        Fiber& fiber = fibers_[running_];
        if (fiber.wait == Wait::kNone) {
          moved = true;
          swapcontext(&scheduler_, &fiber.context);
        }
      }
      for (const Fiber& fiber : fibers_) ended += fiber.wait == Wait::kEnded ? 1 : 0;
      if (!moved && ended < count) {
        std::fprintf(stderr,
                     "fibers: %u of %u threads of group (%u, %u) wait for others that have "
                     "ended or wait for something else\n",
                     count - ended, count, group_x_, group_y_);
        std::abort();
      }
    }
  }

  const uint32_t wave_;
  std::vector<Fiber> fibers_;
  std::vector<uint32_t> values_;
  ucontext_t scheduler_ = {};
  const std::function<void()>* kernel_ = nullptr;
  uint32_t running_ = 0;
  uint32_t group_x_ = 0;
  uint32_t group_y_ = 0;
};

}  // namespace kvxfer::gpu

#endif  // KVXFER_DEVICE_KERNEL_FIBERS_H_
