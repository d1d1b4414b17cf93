#include "base/thread.h"

#include <pthread.h>
#include <signal.h>

#include <exception>
#include <system_error>
#include <utility>

#include "base/unique_fd.h"
#include "kvxfer/status.h"

namespace kvxfer {

void prepare_to_throw() noexcept {
  // Volatile: compilers know that the call has no effect that they need to keep.
  [[maybe_unused]] volatile int count = std::uncaught_exceptions();
}

Thread::Thread(const std::string& name, std::function<void()> body)
    : generation_(fork_generation()) {
  // The mask is inherited, so it is set around the creation: there is no moment in which the new
  // thread could take a signal.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = std::make_unique<std::thread>([body = std::move(body)] {
      prepare_to_throw();
      body();
    });
  } catch (const std::system_error& error) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw Error(StatusCode::kNoResources, "cannot start thread '" + name + "': " + error.what() +
                                              "; check the limit on threads (ulimit -u, pids.max)");
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  id_ = thread_->get_id();
  pthread_setname_np(thread_->native_handle(), name.substr(0, 15).c_str());
}

void Thread::join() {
  if (!thread_) return;
  if (generation_ != fork_generation()) {
    static_cast<void>(thread_.release());  // std::thread ends the program when it is not joined
  } else if (is_current()) {
    thread_->detach();
    thread_.reset();
  } else {
    thread_->join();
    thread_.reset();
  }
}

}  // namespace kvxfer
