// A clock of the day that jumps on demand, for a process that loads this before the C library.
// Other clocks, the monotonic one above all, go on as they are.

#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace {

constexpr int64_t kSecond = 1'000'000'000;

std::atomic<int64_t> wrong_by_nanos{0};

}  // namespace

extern "C" {

void kvxfer_clock_jump(double seconds) {
  wrong_by_nanos = static_cast<int64_t>(seconds * static_cast<double>(kSecond));
}

int clock_gettime(clockid_t clock, timespec* now) noexcept {
  const int result = static_cast<int>(syscall(SYS_clock_gettime, clock, now));
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
    const int64_t nanos = int64_t{now->tv_sec} * kSecond + now->tv_nsec + wrong_by_nanos;
    now->tv_sec = nanos / kSecond;
    now->tv_nsec = nanos % kSecond;
  }
  return result;
}

int gettimeofday(timeval* now, void*) noexcept {
  timespec precise;
  clock_gettime(CLOCK_REALTIME, &precise);
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return 0;
}

time_t time(time_t* now) noexcept {
  timespec precise;
  clock_gettime(CLOCK_REALTIME, &precise);
  if (now != nullptr) *now = precise.tv_sec;
  return precise.tv_sec;
}

}  // extern "C"
