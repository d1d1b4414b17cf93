#ifndef KVXFER_BASE_CLOCK_H_
#define KVXFER_BASE_CLOCK_H_

#include <chrono>

namespace kvxfer {

// Monotonic time. Deadlines are TimePoints; kNever is "no deadline".
using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;
using Duration = Clock::duration;

constexpr TimePoint kNever = TimePoint::max();

// Time from now until `when` in whole milliseconds, rounded up so that a sleep of that length never
// ends early: 0 when it has passed, -1 (poll's and epoll's "for ever") for kNever.
int millis_until(TimePoint when, TimePoint now);

}  // namespace kvxfer

#endif  // KVXFER_BASE_CLOCK_H_
