#ifndef KVXFER_UCX_H_
#define KVXFER_UCX_H_

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvxfer/transport.h"

namespace kvxfer {

// Fabrics that UCX knows, through its UCP, which is loaded when it is first used. UCX's own
// environment variables (UCX_TLS, UCX_NET_DEVICES, ...) say what it may use. docs/transports.md has
// the rest.

struct UcxOptions {
  // Files of libucp that are tried when none is loaded, KVXFER_UCX_PATH is not set and the system
  // has none.
  std::vector<std::string> libraries;
  bool rdma_only = false;  // leave out whatever is no RDMA, and fail where that is all
};

// Which UCX was found, and what it could use here.
struct UcxInfo {
  std::string path, version;
  std::vector<std::string> resources;  // as "tcp/eth0", "rc_verbs/mlx5_0:1"
  bool rdma = false;                   // one of them is
};

// Throws Error(kNoResources) where there is no UCX, or none that can be used.
UcxInfo describe_ucx(const UcxOptions& options);

// Memory that peers may write into, until the last reference goes. It may not be unmapped before.
class UcxMemory;

// UCX as one agent uses it; serves any number of links, which keep it alive. Thread-safe.
class UcxFabric {
 public:
  // `threads` outlives it. Throws as describe_ucx().
  UcxFabric(IoThreads& threads, const UcxOptions& options);
  ~UcxFabric();

  UcxFabric(const UcxFabric&) = delete;
  UcxFabric& operator=(const UcxFabric&) = delete;

  // Registers memory of the host. A write whose source lies within registered memory goes out in
  // place. `owner`, if any, is held for as long. Throws Error(kNoResources).
  std::shared_ptr<UcxMemory> register_memory(std::span<std::byte> memory,
                                             std::shared_ptr<void> owner = nullptr);

  struct State;

 private:
  friend class UcxEndpoint;
  std::shared_ptr<State> state_;
};

// One side of a connection that is being made. Move-only; not thread-safe.
class UcxEndpoint {
 public:
  // `arena`: what the peer is to write into (the consumer's side), or null (the producer's). Throws
  // Error(kNoResources).
  UcxEndpoint(const UcxFabric& fabric, std::shared_ptr<UcxMemory> arena);
  ~UcxEndpoint();
  UcxEndpoint(UcxEndpoint&&) noexcept;
  UcxEndpoint& operator=(UcxEndpoint&&) noexcept;

  // What the peer's connect() needs, a few hundred bytes; the producer's once its own connect() has
  // returned, for it says what that came to. For nobody but an authenticated peer.
  const std::vector<std::byte>& address() const;

  // Connects to the peer whose endpoint said `remote`, the producer first. `control_fd` is a
  // connected stream socket to the same peer, owned from the call on, also when it throws. Waits
  // for up to `timeout` seconds until the peer has answered. Once. Throws Error(kProtocol) when
  // `remote` is malformed, Error(kUnreachable), Error(kNoResources).
  std::shared_ptr<Link> connect(int control_fd, std::span<const std::byte> remote, double timeout);

  // What UCX has chosen for the way from producer to consumer, known once connected: as "tcp/eth0",
  // in terms of the producer, whose word it is at the consumer.
  const std::vector<std::string>& lanes() const;
  bool rdma() const;  // all lanes are

  struct State;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace kvxfer

#endif  // KVXFER_UCX_H_
