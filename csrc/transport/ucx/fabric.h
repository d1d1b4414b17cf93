#ifndef KVXFER_TRANSPORT_UCX_FABRIC_H_
#define KVXFER_TRANSPORT_UCX_FABRIC_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/event_loop.h"
#include "kvxfer/ucx.h"
#include "transport/ucx/library.h"

namespace kvxfer {

namespace ucp {

// Throws Error(kNoResources) saying what failed.
void check(const Library& library, Status status, const std::string& what);

// What `print` writes.
std::string printed(const std::function<void(FILE*)>& print);

bool is_rdma(const std::string& resource);

// Whether over this lane the adapter itself carries out a put. Elsewhere UCX emulates it, and when
// the writer dies in the middle of that, the reader's process is aborted ("Fatal: unexpected error:
// Endpoint timeout", seen with 1.13 and 1.22).
bool can_put(const std::string& lane);

}  // namespace ucp

// A context of UCP. Immutable but for the registry of memory.
struct UcxFabric::State : std::enable_shared_from_this<State> {
  // `io` is needed for loop() only.
  State(IoThreads* io, const UcxOptions& options);
  ~State();

  State(const State&) = delete;
  State& operator=(const State&) = delete;

  // The one that a new link lives on.
  std::shared_ptr<EventLoop> loop() { return threads->bulk(next_loop++); }

  std::shared_ptr<UcxMemory> register_memory(std::span<std::byte> memory,
                                             std::shared_ptr<void> owner);
  // What `source` lies in, or null.
  std::shared_ptr<UcxMemory> memory_of(std::span<const std::byte> source);

  IoThreads* const threads;
  const std::shared_ptr<const ucp::Library> library;
  ucp::Context* context = nullptr;
  std::vector<std::string> resources;
  // Whether some of them can put, and we ask that of UCX. It would serve the puts and gets of
  // whoever reaches one of its ports, at any address of the process: so not where nobody puts.
  bool puts = false;

 private:
  // Makes the context with what is allowed, or, if that is empty, with all that UCX finds. Returns
  // which transports of it are for connecting only.
  std::set<std::string> open(const std::string& transports);

  const uint64_t generation_;
  std::atomic<size_t> next_loop{0};
  std::mutex mutex_;
  // Guarded by mutex_; by begin. Of several of the same memory the last: any will do.
  std::map<const std::byte*, std::weak_ptr<UcxMemory>> memories_;
};

class UcxMemory {
 public:
  UcxMemory(std::shared_ptr<UcxFabric::State> fabric, std::span<std::byte> memory,
            std::shared_ptr<void> owner);
  ~UcxMemory();

  UcxMemory(const UcxMemory&) = delete;
  UcxMemory& operator=(const UcxMemory&) = delete;

  std::span<std::byte> memory() const { return memory_; }
  bool holds(std::span<const std::byte> part) const {
    return part.data() >= memory_.data() &&
           part.data() + part.size() <= memory_.data() + memory_.size();
  }
  // Null, and the rkey empty, where nobody puts.
  ucp::Memory* handle() const { return handle_; }
  std::string rkey() const;  // throws Error(kNoResources)

 private:
  const std::shared_ptr<void> owner_;
  const std::shared_ptr<UcxFabric::State> fabric_;
  const std::span<std::byte> memory_;
  const uint64_t generation_;
  ucp::Memory* handle_ = nullptr;
};

}  // namespace kvxfer

#endif  // KVXFER_TRANSPORT_UCX_FABRIC_H_
