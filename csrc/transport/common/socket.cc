#include "transport/common/socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <system_error>

#include "kvxfer/status.h"

namespace kvxfer {
namespace {

// Longer than any heartbeat, so that the engine, which knows more, speaks first.
constexpr unsigned kUserTimeoutMs = 30'000;

int socket_option(int fd, int level, int name) {
  int value = -1;
  socklen_t size = sizeof(value);
  return ::getsockopt(fd, level, name, &value, &size) == 0 ? value : -1;
}

std::string address_text(const sockaddr_storage& address) {
  char text[INET6_ADDRSTRLEN] = "?";
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    ::inet_ntop(AF_INET, &v4.sin_addr, text, sizeof(text));
    return std::string(text) + ":" + std::to_string(ntohs(v4.sin_port));
  }
  if (address.ss_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
    ::inet_ntop(AF_INET6, &v6.sin6_addr, text, sizeof(text));
    return "[" + std::string(text) + "]:" + std::to_string(ntohs(v6.sin6_port));
  }
  return address.ss_family == AF_UNIX ? "unix" : "?";
}

}  // namespace

void prepare_stream_socket(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || socket_option(fd, SOL_SOCKET, SO_TYPE) != SOCK_STREAM) {
    throw Error(StatusCode::kInvalid,
                "descriptor " + std::to_string(fd) + " is not a connected stream socket");
  }
  ::fcntl(fd, F_SETFL, flags | O_NONBLOCK);
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
}

bool is_tcp_socket(int fd) { return socket_option(fd, SOL_SOCKET, SO_PROTOCOL) == IPPROTO_TCP; }

void prepare_tcp_socket(int fd) {
  prepare_stream_socket(fd);
  if (!is_tcp_socket(fd)) {
    throw Error(StatusCode::kInvalid, "descriptor " + std::to_string(fd) + " is not a TCP socket");
  }
  const int one = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &kUserTimeoutMs, sizeof(kUserTimeoutMs));
}

std::string local_address(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return "?";
  return address_text(address);
}

std::string peer_address(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return "?";
  return address_text(address);
}

std::string error_text(int error) { return std::system_category().message(error); }

}  // namespace kvxfer
