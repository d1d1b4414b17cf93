#ifndef KVXFER_TRANSPORT_VERBS_FABRIC_H_
#define KVXFER_TRANSPORT_VERBS_FABRIC_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/event_loop.h"
#include "kvxfer/verbs.h"
#include "transport/verbs/address.h"
#include "transport/verbs/direct.h"
#include "transport/verbs/memory.h"
#include "transport/verbs/queue_pair.h"
#include "transport/verbs/rail.h"

namespace kvxfer {

namespace ibv {

// Who wants to know what adapters report on their own. Called on the control loop.
class Listener {
 public:
  virtual ~Listener() = default;
  virtual void on_port_down(size_t nic, uint8_t port) = 0;
  virtual void on_queue_pair_error(size_t nic, uint32_t number) = 0;
  // No completion comes from there any more. It may be gone: compare it, and nothing else.
  virtual void on_completion_queue_error(size_t nic, const Cq* cq) = 0;
  virtual void on_adapter_error(size_t nic) = 0;
};

}  // namespace ibv

// Immutable but for the registry of memory and of listeners.
struct VerbsFabric::State : std::enable_shared_from_this<State> {
  State(std::shared_ptr<EventLoop> control_loop, const VerbsOptions& given);
  ~State();

  // Begins to watch for what adapters report.
  void watch();

  std::shared_ptr<VerbsMemory> register_memory(std::span<std::byte> memory, VerbsAccess access,
                                               std::shared_ptr<void> owner);
  // Memory of a cache, for the direct path.
  std::shared_ptr<ibv::LocalMemory> register_direct(std::span<const DirectSpan> memory,
                                                    Link::DirectUse use) const;
  // What `source` lies in, or, where nothing registered holds it, a registration of its own.
  std::shared_ptr<VerbsMemory> memory_of(std::span<const std::byte> source);

  void add(const std::shared_ptr<ibv::Listener>& listener);

  const std::shared_ptr<EventLoop> control;
  const VerbsOptions options;
  std::vector<std::shared_ptr<ibv::Nic>> nics;
  std::vector<ibv::Rail> rails;
  std::shared_ptr<ibv::Loopbacks> loopbacks;
  std::string nearness;  // to what they were chosen: " nearest to ...", or nothing

 private:
  void on_async_event(size_t nic);

  std::mutex mutex_;
  std::map<const std::byte*, std::weak_ptr<VerbsMemory>> memories_;  // guarded by mutex_; by begin
  std::vector<std::weak_ptr<ibv::Listener>> listeners_;              // guarded by mutex_
};

struct VerbsEndpoint::State {
  std::shared_ptr<VerbsFabric::State> fabric;
  std::shared_ptr<VerbsMemory> arena;   // null: the producer's side
  std::shared_ptr<VerbsMemory> source;  // null: not known
  ibv::EndpointAddress address;
  std::vector<std::byte> encoded;
  std::vector<std::vector<std::unique_ptr<ibv::QueuePair>>> qps;  // [rail][queue pair]
};

}  // namespace kvxfer

#endif  // KVXFER_TRANSPORT_VERBS_FABRIC_H_
