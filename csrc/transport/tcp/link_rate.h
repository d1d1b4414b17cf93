#ifndef KVXFER_TRANSPORT_TCP_LINK_RATE_H_
#define KVXFER_TRANSPORT_TCP_LINK_RATE_H_

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "base/clock.h"

namespace kvxfer {

// What one stream has sent since its connection began.
struct StreamCount {
  uint64_t acked = 0;    // bytes
  uint64_t busy_us = 0;  // in which there was something to send, and room in the peer's window
};

// The rate of a path that several streams share, from what they count. Not thread-safe.
class RateMeter {
 public:
  explicit RateMeter(size_t streams) : last_(streams) {}

  // Takes what the streams have counted `elapsed_us` after the call before. Streams that take turns
  // keep the path busy one after the other, those that run side by side all at once: which of the
  // two it was shows only while little time has passed, so call it often. After a pause it takes
  // the middle.
  void add(uint64_t elapsed_us, std::span<const StreamCount> now);

  // Bytes a second, smoothed; none before enough was sent.
  std::optional<double> rate() const { return rate_; }

 private:
  std::vector<StreamCount> last_;
  uint64_t bytes_ = 0, busy_us_ = 0;  // since rate_ was updated
  std::optional<double> rate_;
};

// What the path behind some TCP sockets carries: how much was acknowledged in the time in which the
// network, and not the application on either side, held the kernel up. Thread-safe.
class LinkRate {
 public:
  // The sockets outlive it, and stay its owner's.
  explicit LinkRate(std::vector<int> sockets);

  // To be called with every write: looks at the sockets now and then.
  void note();

  // Bytes a second: a smoothed recent value, but no more than a network device says that it
  // carries; before enough was sent, what the interface says; none where that says nothing, as the
  // loopback interface.
  std::optional<double> read();

 private:
  void look(TimePoint now);  // needs the mutex

  const std::vector<int> sockets_;
  std::atomic<TimePoint> next_look_{TimePoint{}};
  std::mutex mutex_;
  RateMeter meter_;  // guarded by mutex_, like what follows
  TimePoint last_look_;
  std::optional<double> interface_;
  bool is_device_ = false;
  bool interface_asked_ = false;
};

struct InterfaceRate {
  double bytes_per_second = 0;
  bool is_device = false;  // hardware, or what a hypervisor shows as such: others make it up
};
// What the network interface with a socket's local address says of itself.
std::optional<InterfaceRate> interface_rate(int socket);

}  // namespace kvxfer

#endif  // KVXFER_TRANSPORT_TCP_LINK_RATE_H_
