#ifndef KVXFER_TRANSPORT_VERBS_LOOPBACK_H_
#define KVXFER_TRANSPORT_VERBS_LOOPBACK_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "kvxfer/verbs.h"
#include "transport/verbs/rail.h"

namespace kvxfer::ibv {

class Loopback;

// A connection of each adapter with itself, made when it is first used and again when it has
// failed: by it an adapter writes into registered memory, or reads from it, without a peer.
// Thread-safe.
class Loopbacks {
 public:
  // `nics`: how many adapters the rails are of.
  Loopbacks(const std::vector<Rail>& rails, size_t nics, const VerbsOptions& options);
  ~Loopbacks();
  Loopbacks(const Loopbacks&) = delete;
  Loopbacks& operator=(const Loopbacks&) = delete;

  size_t adapters() const { return slots_.size(); }
  std::string name(size_t nic) const;

  // Up to kNoticeBytes. They wait until it is done, and throw Error(kNoResources) where that fails
  // or takes longer than `seconds`: nothing is written any more then.
  void put(size_t nic, uint64_t to, uint32_t rkey, std::span<const std::byte> bytes,
           double seconds);
  void get(size_t nic, uint64_t from, uint32_t lkey, std::span<std::byte> bytes, double seconds);

 private:
  struct Slot {
    std::vector<Rail> rails;
    std::mutex mutex;
    std::unique_ptr<Loopback> loopback;  // guarded by mutex
  };
  template <typename Use>
  void use(size_t nic, Use use);

  const VerbsOptions options_;
  std::vector<std::unique_ptr<Slot>> slots_;
};

}  // namespace kvxfer::ibv

#endif  // KVXFER_TRANSPORT_VERBS_LOOPBACK_H_
