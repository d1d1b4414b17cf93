#include "base/clock.h"

#include <algorithm>

namespace kvxfer {

int millis_until(TimePoint when, TimePoint now) {
  if (when == kNever) return -1;
  if (when <= now) return 0;
  constexpr auto kLongest = std::chrono::hours(1);
  if (when - now >= kLongest) return static_cast<int>(std::chrono::milliseconds(kLongest).count());
  return static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(when - now).count());
}

}  // namespace kvxfer
