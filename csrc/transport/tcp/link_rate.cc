#include "transport/tcp/link_rate.h"

#include <ifaddrs.h>
#include <linux/tcp.h>  // <netinet/tcp.h> of older C libraries lacks the newer fields of tcp_info
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

namespace kvxfer {
namespace {

constexpr uint64_t kEnoughBytes = 1u << 20;
// The kernel counts in ticks of up to 10 ms: of less time nothing is known.
constexpr uint64_t kEnoughMicros = 20000;
constexpr double kNewest = 0.5;                         // weight of what was measured last
constexpr std::chrono::milliseconds kBetweenLooks{10};  // a tick or more
// After so many microseconds, streams may as well have sent at once as in turns.
constexpr uint64_t kTellsLittle = 100000;

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

StreamCount count_of(int socket) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return {};
  const uint64_t idle = info.tcpi_rwnd_limited;
  const uint64_t busy = info.tcpi_busy_time;
  return {info.tcpi_bytes_acked, busy > idle ? busy - idle : 0};
}

}  // namespace

std::optional<InterfaceRate> interface_rate(int socket) {
  const std::string name = interface_of(socket);
  if (name.empty()) return std::nullopt;
  const std::string folder = "/sys/class/net/" + name;
  std::ifstream file(folder + "/speed");
  double megabits = 0;
  // Interfaces without a speed cannot be read, or say -1.
  if (!(file >> megabits) || megabits <= 0) return std::nullopt;
  std::error_code error;
  return InterfaceRate{megabits * 1e6 / 8, std::filesystem::exists(folder + "/device", error)};
}

void RateMeter::add(uint64_t elapsed_us, std::span<const StreamCount> now) {
  uint64_t bytes = 0, busy = 0, longest = 0;
  for (size_t i = 0; i < last_.size(); ++i) {
    if (now[i].acked < last_[i].acked) continue;  // the kernel had no answer
    const uint64_t spent = std::max(now[i].busy_us, last_[i].busy_us) - last_[i].busy_us;
    bytes += now[i].acked - last_[i].acked;
    busy += spent;
    longest = std::max(longest, spent);
    last_[i] = {now[i].acked, last_[i].busy_us + spent};
  }
  bytes_ += bytes;
  const bool too_long = elapsed_us > kTellsLittle && busy < elapsed_us;
  busy_us_ += too_long ? (longest + busy) / 2 : std::max(longest, std::min(busy, elapsed_us));
  if (bytes_ < kEnoughBytes || busy_us_ < kEnoughMicros) return;
  const double found = static_cast<double>(bytes_) / static_cast<double>(busy_us_) * 1e6;
  rate_ = rate_ ? kNewest * found + (1 - kNewest) * *rate_ : found;
  bytes_ = busy_us_ = 0;
}

LinkRate::LinkRate(std::vector<int> sockets)
    : sockets_(std::move(sockets)), meter_(sockets_.size()), last_look_(Clock::now()) {}

void LinkRate::note() {
  const TimePoint now = Clock::now();
  if (now < next_look_.load(std::memory_order_relaxed)) return;
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (lock) look(now);
}

void LinkRate::look(TimePoint now) {
  std::vector<StreamCount> counts;
  counts.reserve(sockets_.size());
  for (const int socket : sockets_) counts.push_back(count_of(socket));
  const auto elapsed = std::chrono::duration_cast<std::chrono::microseconds>(now - last_look_);
  meter_.add(static_cast<uint64_t>(std::max<int64_t>(elapsed.count(), 0)), counts);
  last_look_ = now;
  next_look_.store(now + kBetweenLooks, std::memory_order_relaxed);
}

std::optional<double> LinkRate::read() {
  const std::lock_guard lock(mutex_);
  if (!interface_asked_) {
    interface_asked_ = true;
    const auto found = sockets_.empty() ? std::nullopt : interface_rate(sockets_[0]);
    if (found) {
      interface_ = found->bytes_per_second;
      is_device_ = found->is_device;
    }
  }
  look(Clock::now());
  const std::optional<double> measured = meter_.rate();
  if (measured && is_device_) return std::min(*measured, *interface_);
  return measured ? measured : interface_;
}

}  // namespace kvxfer
