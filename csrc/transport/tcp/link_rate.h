#ifndef KVXFER_TRANSPORT_TCP_LINK_RATE_H_
#define KVXFER_TRANSPORT_TCP_LINK_RATE_H_

#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

namespace kvxfer {

// What the path behind some TCP sockets carries: how much was acknowledged in the time in which the
// network, and not the application on either side, held the kernel up. Thread-safe.
class LinkRate {
 public:
  // The sockets outlive it, and stay its owner's.
  explicit LinkRate(std::vector<int> sockets);

  // Bytes a second: a smoothed recent value; before enough was sent, what the interface says of
  // itself; none where that says nothing, as the loopback interface.
  std::optional<double> read();

 private:
  struct Sample {
    uint64_t acked = 0;       // bytes
    uint64_t network_us = 0;  // in which there was something to send, and room in the peer's window
  };
  static Sample sample(int socket);

  const std::vector<int> sockets_;
  std::mutex mutex_;
  std::vector<Sample> last_;         // guarded by mutex_; like sockets_
  std::optional<double> smoothed_;   // guarded by mutex_
  std::optional<double> interface_;  // guarded by mutex_
  bool interface_asked_ = false;     // guarded by mutex_
};

// What the network interface with a socket's local address says of itself, in bytes a second.
std::optional<double> interface_rate(int socket);

}  // namespace kvxfer

#endif  // KVXFER_TRANSPORT_TCP_LINK_RATE_H_
