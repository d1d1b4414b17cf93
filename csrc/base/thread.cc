#include "base/thread.h"

#include <pthread.h>
#include <signal.h>

#include <exception>
#include <new>
#include <system_error>
#include <utility>

#include "base/unique_fd.h"
#include "kvxfer/status.h"

namespace kvxfer {

void prepare_to_throw() noexcept {
  // Volatile: compilers know that the call has no effect that they need to keep.
  [[maybe_unused]] volatile int count = std::uncaught_exceptions();
}

namespace {

// The mask is inherited, so all signals are blocked around the creation of a thread: there is no
// moment in which the new one could take a signal.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

Thread::Thread(const std::string& name, std::function<void()> body)
    : generation_(fork_generation()) {
  try {
    const SignalsBlocked blocked;
    thread_ = std::make_unique<std::thread>([body = std::move(body)] {
      prepare_to_throw();
      body();
    });
  } catch (const std::system_error& error) {
    throw Error(StatusCode::kNoResources, "cannot start thread '" + name + "': " + error.what() +
                                              "; check the limit on threads (ulimit -u, pids.max)");
  } catch (const std::bad_alloc&) {
    throw Error(StatusCode::kNoResources,
                "cannot start thread '" + name + "': there is no memory for it");
  }
  id_ = thread_->get_id();
  pthread_setname_np(thread_->native_handle(), name.substr(0, 15).c_str());
}

void Thread::join() {
  if (!thread_) return;
  if (generation_ != fork_generation() || is_current()) return leave();
  thread_->join();
  thread_.reset();
}

void Thread::leave() {
  if (!thread_) return;
  if (generation_ != fork_generation()) {
    static_cast<void>(thread_.release());  // std::thread ends the program when it is not joined
  } else {
    thread_->detach();
    thread_.reset();
  }
}

}  // namespace kvxfer
