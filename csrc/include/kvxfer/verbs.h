#ifndef KVXFER_VERBS_H_
#define KVXFER_VERBS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvxfer/transport.h"

namespace kvxfer {

// RDMA through libibverbs, which is loaded when a VerbsFabric is made. docs/verbs.md says how it
// works and how to set it up.

struct VerbsOptions {
  std::string library;               // empty: KVXFER_VERBS_LIBRARY, else libibverbs.so.1
  std::vector<std::string> devices;  // "mlx5_0" or "mlx5_0:1"; empty: every port that is active
  // Whose buffers they are: "0000:c1:00.0", a GPU, or "numa:1". Of the ports only the nearest are
  // used then, and it is an error where there is no such thing.
  std::string near_to;
  // Without that: PCI addresses of the GPUs that hold caches. The ports nearest to any of them are
  // used, but for those with less than half of the fastest one's speed; all, where sysfs does not
  // show each of them. Empty addresses are of GPUs that it can't show.
  std::vector<std::string> gpus;
  std::string sysfs = "/sys";  // where that is looked up
  int gid_index = -1;          // of every port; -1: chosen by rule, for each peer
  uint32_t queue_pairs = 2;    // for each rail and peer
  uint32_t send_depth = 128;   // work requests under way on a queue pair; less if it has less
  uint32_t receives = 128;     // notices that a queue pair takes before they are looked at
  uint64_t stripe_bytes = 256u << 10;  // a write is cut over rails into parts no smaller than this
  uint8_t timeout = 16;                // 4.096 us * 2^timeout without an acknowledgement, ...
  uint8_t retry_count = 6;             // ... so many times: the rail is dead. 7: for ever on rxe
  uint8_t rnr_retry = 7;               // 7: a peer that has no receive posted is waited for
  uint8_t min_rnr_timer = 12;          // code of the wait before such a retry; 12: 0.64 ms
  uint8_t traffic_class = 0;           // RoCE: DSCP times 4
  uint8_t service_level = 0;
  bool relaxed_ordering = true;  // allow PCIe to reorder data (not completions) where it can
};

// One port of one adapter.
struct VerbsRail {
  std::string device;
  uint32_t port = 0;
  bool active = false;
  std::string link_layer;         // "Ethernet" or "InfiniBand"
  std::vector<std::string> gids;  // those that may be used, e.g. "1: RoCE v2 ::ffff:10.0.0.1"
  uint32_t lid = 0;
  uint32_t mtu = 0;              // bytes
  uint32_t mbit_per_second = 0;  // 0: unknown
  std::string pci_address;       // empty: not on PCI, or unknown
  int numa_node = -1;            // -1: unknown
};

// The rails that a VerbsFabric with these options would have, looked at and let go again. Throws as
// its constructor.
std::vector<VerbsRail> list_verbs_rails(const VerbsOptions& options);

// Memory that the adapters may reach, until the last reference goes. It may not be unmapped before.
class VerbsMemory;

enum class VerbsAccess : uint8_t {
  kSource,  // we write from it
  kArena,   // peers write into it
};

// The rails of this process and the memory registered with them; serves any number of links, which
// keep it alive. Thread-safe.
class VerbsFabric {
 public:
  // Opens the adapters. `threads` outlives it. Throws Error(kNoResources) where there is no library
  // or no rail, Error(kInvalid) where `options` name a rail that does not exist.
  VerbsFabric(IoThreads& threads, const VerbsOptions& options);
  ~VerbsFabric();

  VerbsFabric(const VerbsFabric&) = delete;
  VerbsFabric& operator=(const VerbsFabric&) = delete;

  std::vector<VerbsRail> rails() const;

  // Registers host memory with all adapters. A write whose source lies within registered memory
  // goes out in place; others are registered for as long as they last, which costs system calls.
  // `owner`, if any, is held for as long as the registration. Each registration has keys of its
  // own, which are worth nothing once it has gone.
  // Throws Error(kNoResources), e.g. when the limit of locked memory is met.
  std::shared_ptr<VerbsMemory> register_memory(std::span<std::byte> memory, VerbsAccess access,
                                               std::shared_ptr<void> owner = nullptr);

  struct State;

 private:
  friend class VerbsEndpoint;
  std::shared_ptr<State> state_;
};

// One side of a connection that is being made: its queue pairs, not connected yet. Move-only; not
// thread-safe.
class VerbsEndpoint {
 public:
  // `arena`: what the peer is to write into (the consumer's side), or null (the producer's).
  // `source`: what writes go out from, if it is registered; held for as long as the link lasts.
  // Throws Error(kNoResources).
  VerbsEndpoint(const VerbsFabric& fabric, std::shared_ptr<VerbsMemory> arena,
                std::shared_ptr<VerbsMemory> source = nullptr);
  ~VerbsEndpoint();
  VerbsEndpoint(VerbsEndpoint&&) noexcept;
  VerbsEndpoint& operator=(VerbsEndpoint&&) noexcept;

  // What the peer needs to know to connect: addresses, queue pair numbers and the keys of the
  // arena, a few hundred bytes. For nobody but an authenticated peer.
  const std::vector<std::byte>& address() const;

  struct State;

 private:
  friend std::shared_ptr<Link> make_verbs_link(IoThreads&, int, VerbsEndpoint,
                                               std::span<const std::byte>);
  std::unique_ptr<State> state_;
};

// Connects `endpoint` to the peer whose endpoint said `remote`. `control_fd` is a connected stream
// socket to the same peer, owned from the call on, also when it throws. When this returns, the peer
// may write as soon as its own call has returned too; the side with the arena must have returned
// before it asks the other for anything. Throws Error(kProtocol) when `remote` is malformed,
// Error(kUnreachable) when no rail of ours reaches one of the peer's, Error(kNoResources).
std::shared_ptr<Link> make_verbs_link(IoThreads& threads, int control_fd, VerbsEndpoint endpoint,
                                      std::span<const std::byte> remote);

}  // namespace kvxfer

#endif  // KVXFER_VERBS_H_
