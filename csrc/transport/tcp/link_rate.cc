#include "transport/tcp/link_rate.h"

#include <ifaddrs.h>
#include <linux/tcp.h>  // <netinet/tcp.h> of older C libraries lacks the newer fields of tcp_info
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstring>
#include <fstream>
#include <string>

namespace kvxfer {
namespace {

constexpr uint64_t kEnoughBytes = 1u << 20;
// The kernel counts in ticks of up to 10 ms: of less time nothing is known.
constexpr uint64_t kEnoughMicros = 20000;
constexpr double kNewest = 0.5;  // weight of what was measured last

bool same_address(const sockaddr* a, const sockaddr_storage& b) {
  if (a == nullptr || a->sa_family != b.ss_family) return false;
  if (b.ss_family == AF_INET) {
    return reinterpret_cast<const sockaddr_in*>(a)->sin_addr.s_addr ==
           reinterpret_cast<const sockaddr_in&>(b).sin_addr.s_addr;
  }
  return b.ss_family == AF_INET6 &&
         std::memcmp(&reinterpret_cast<const sockaddr_in6*>(a)->sin6_addr,
                     &reinterpret_cast<const sockaddr_in6&>(b).sin6_addr, sizeof(in6_addr)) == 0;
}

// Name of the interface that has a socket's local address, or "".
std::string interface_of(int socket) {
  sockaddr_storage local{};
  socklen_t size = sizeof(local);
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&local), &size) != 0) return "";
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return "";
  std::string name;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (same_address(entry->ifa_addr, local)) name = entry->ifa_name;
  }
  ::freeifaddrs(list);
  return name;
}

}  // namespace

std::optional<double> interface_rate(int socket) {
  const std::string name = interface_of(socket);
  if (name.empty()) return std::nullopt;
  std::ifstream file("/sys/class/net/" + name + "/speed");
  double megabits = 0;
  // Interfaces without a speed cannot be read, or say -1.
  if (!(file >> megabits) || megabits <= 0) return std::nullopt;
  return megabits * 1e6 / 8;
}

LinkRate::LinkRate(std::vector<int> sockets)
    : sockets_(std::move(sockets)), last_(sockets_.size()) {}

LinkRate::Sample LinkRate::sample(int socket) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return {};
  const uint64_t idle = info.tcpi_rwnd_limited;
  const uint64_t busy = info.tcpi_busy_time;
  return {info.tcpi_bytes_acked, busy > idle ? busy - idle : 0};
}

std::optional<double> LinkRate::read() {
  const std::lock_guard lock(mutex_);
  if (!interface_asked_) {
    interface_asked_ = true;
    if (!sockets_.empty()) interface_ = interface_rate(sockets_[0]);
  }
  std::vector<Sample> now;
  uint64_t bytes = 0, micros = 0;
  double rate = 0;
  for (size_t i = 0; i < sockets_.size(); ++i) {
    now.push_back(sample(sockets_[i]));
    if (now[i].acked < last_[i].acked || now[i].network_us <= last_[i].network_us) continue;
    const uint64_t acked = now[i].acked - last_[i].acked;
    const uint64_t spent = now[i].network_us - last_[i].network_us;
    bytes += acked;
    micros += spent;
    rate += static_cast<double>(acked) / static_cast<double>(spent) * 1e6;  // they share the link
  }
  if (bytes >= kEnoughBytes && micros >= kEnoughMicros) {
    last_ = std::move(now);
    smoothed_ = smoothed_ ? kNewest * rate + (1 - kNewest) * *smoothed_ : rate;
  }
  return smoothed_ ? smoothed_ : interface_;
}

}  // namespace kvxfer
