#include "base/thread.h"

#include <signal.h>

#include <doctest/doctest.h>

#include <chrono>
#include <future>
#include <memory>

#include "base/clock.h"
#include "base/thread_pool.h"
#include "failing_new.h"
#include "kvxfer/status.h"

namespace kvxfer {
namespace {

TEST_CASE("a thread that there is no memory for is refused, and its maker still takes signals") {
  if (!fail_new(-1)) {
    MESSAGE("skipped: operator new is the sanitizer's");
    return;
  }
  int refused = 0;
  for (int n = 0; n < 4; ++n) {
    CAPTURE(n);
    fail_new(n);
    try {
      Thread thread("test", [] {});
    } catch (const Error& error) {
      CHECK(error.code() == StatusCode::kNoResources);
      ++refused;
    }
    fail_new(-1);
    sigset_t now;
    REQUIRE(pthread_sigmask(SIG_SETMASK, nullptr, &now) == 0);
    CHECK(sigismember(&now, SIGINT) == 0);
    CHECK(sigismember(&now, SIGTERM) == 0);
  }
  CHECK(refused >= 2);
  CHECK(refused < 4);
}

TEST_CASE("a pool whose task does not end is waited for until the deadline, and ends by itself") {
  struct Gate {
    std::promise<void> opened, first, second;
  };
  const auto gate = std::make_shared<Gate>();
  std::future<void> first = gate->first.get_future(), second = gate->second.get_future();
  {
    ThreadPool pool(1, "test");
    pool.submit([gate] {
      gate->opened.get_future().wait();
      gate->first.set_value();
    });
    pool.submit([gate] { gate->second.set_value(); });
    CHECK(!pool.stop_until(Clock::now() + std::chrono::milliseconds(20)));
    CHECK(!pool.submit([] {}));
    pool.stop();  // joins nobody any more
  }
  gate->opened.set_value();
  first.wait();
  second.wait();
  ThreadPool idle(2, "test");
  std::promise<void> done;
  idle.submit([&] { done.set_value(); });
  CHECK(idle.stop_until(kNever));
  CHECK(done.get_future().wait_for(std::chrono::seconds(0)) == std::future_status::ready);
}

}  // namespace
}  // namespace kvxfer
