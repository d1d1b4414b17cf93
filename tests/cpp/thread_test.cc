#include "base/thread.h"

#include <signal.h>

#include <doctest/doctest.h>

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

}  // namespace
}  // namespace kvxfer
