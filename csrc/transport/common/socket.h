#ifndef KVXFER_TRANSPORT_COMMON_SOCKET_H_
#define KVXFER_TRANSPORT_COMMON_SOCKET_H_

#include <string>

namespace kvxfer {

// Makes recv() and send() on a connected socket return at once. Throws Error(kInvalid) when `fd` is
// not a stream socket.
void prepare_stream_socket(int fd);

// What every TCP socket of ours wants besides: no delay for small messages, and an end when sent
// data stays unacknowledged for long. Throws Error(kInvalid) when it is no TCP socket.
void prepare_tcp_socket(int fd);

bool is_tcp_socket(int fd);

// "10.0.0.1:5000" or "[::1]:5000"; "unix" for a socket of this host.
std::string local_address(int fd);
std::string peer_address(int fd);

// Text of an errno value, thread-safe.
std::string error_text(int error);

}  // namespace kvxfer

#endif  // KVXFER_TRANSPORT_COMMON_SOCKET_H_
