#ifndef KVXFER_TRANSPORT_VERBS_NOTICE_H_
#define KVXFER_TRANSPORT_VERBS_NOTICE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "transport/verbs/address.h"

namespace kvxfer::ibv {

// What begins each SEND. It follows the bytes that it speaks of on the same queue pair, which keeps
// the order, so when it arrives they have.
struct NoticeHeader {
  static constexpr uint32_t kBytes = 20;

  uint64_t write = 0;         // counts the writes of a link
  uint32_t notice_bytes = 0;  // of the whole notice
  uint32_t notice_at = 0;     // where the piece of it that follows belongs
  uint16_t stripes = 0;       // that the write was cut into
  bool ends_stripe = false;   // one stripe has arrived

  void store(std::byte* to) const;
  // Throws Error(kProtocol).
  static NoticeHeader load(std::span<const std::byte> from);
};

constexpr uint32_t kNoticePiece = kNoticeBytes - NoticeHeader::kBytes;

// Puts writes together again whose stripes arrive over several queue pairs. Thread-safe.
class Inbox {
 public:
  struct Arrived {
    bool stripe = false;  // a stripe is complete
    bool write = false;   // and with it a write
    std::vector<std::byte> notice;
  };

  // `message`: one SEND. Throws Error(kProtocol) when it makes no sense.
  Arrived take(std::span<const std::byte> message);

 private:
  struct Open {
    uint16_t stripes_left = 0;
    uint16_t stripes = 0;
    std::vector<std::byte> notice;
  };

  std::mutex mutex_;
  std::map<uint64_t, Open> open_;  // guarded by mutex_; by number of the write
};

}  // namespace kvxfer::ibv

#endif  // KVXFER_TRANSPORT_VERBS_NOTICE_H_
