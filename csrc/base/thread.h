#ifndef KVXFER_BASE_THREAD_H_
#define KVXFER_BASE_THREAD_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>

namespace kvxfer {

// Lets the calling thread throw where there is no memory: what the C++ library needs for that it
// finds when a thread first throws, and where it is loaded late, as into Python, the C library ends
// the process when there is none: so does this, at a better time. Cheap.
void prepare_to_throw() noexcept;

// A named thread that blocks all signals: the process that we run in handles its SIGCHLD and SIGINT
// on threads of its own. It is prepared to throw. Not thread-safe.
class Thread {
 public:
  // `name` is cut to 15 characters. Throws Error(kNoResources) when no thread can be made.
  Thread(const std::string& name, std::function<void()> body);

  // As join().
  ~Thread() { join(); }

  Thread(const Thread&) = delete;
  Thread& operator=(const Thread&) = delete;

  // Waits for the end. Called on the thread itself, or in a forked child, where the thread does not
  // exist, it only lets go of it. Idempotent.
  void join();
  // Lets it run on by itself: what it uses must outlive it.
  void leave();

  bool is_current() const { return id_ == std::this_thread::get_id(); }

 private:
  std::unique_ptr<std::thread> thread_;
  std::thread::id id_;
  uint64_t generation_ = 0;
};

}  // namespace kvxfer

#endif  // KVXFER_BASE_THREAD_H_
