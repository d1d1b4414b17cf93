#ifndef KVXFER_WIRE_MESSAGES_H_
#define KVXFER_WIRE_MESSAGES_H_

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kvxfer/digest.h"
#include "kvxfer/status.h"

namespace kvxfer::wire {

// History of the protocol. A peer of another version is refused at HELLO, by name.
//   1  first
//   2  codecs: HELLO says which schemes, LAYOUT has scales, FETCH asks, ACCEPT tells, and the bytes
//      of COMMIT are those of a coded chunk
//   3  consumers that do not fetch: DECLINE and DECLINED; FETCH says how many fetch; the status
//      WITHDRAWN
//   4  the status BUSY; REFUSED says when to try again; MEMORY, FETCH_DIRECT and ACCEPT_DIRECT
//      between those who set kDirectBit; GPU_ARENA and what follows it between those who set
//      kGpuIpcBit
constexpr uint16_t kProtocolVersion = 4;

// First byte of every control message. Append, never renumber.
enum class MessageType : uint8_t {
  kHello = 1,
  kLayout = 2,
  kFetch = 3,
  kAccept = 4,
  kCommit = 5,
  kRefused = 6,
  kCredit = 7,
  kDone = 8,
  kCancel = 9,
  kCancelled = 10,
  kPing = 11,
  kRenew = 12,
  kBye = 13,
  kWant = 14,
  kDecline = 15,
  kDeclined = 16,
  kMemory = 17,
  kFetchDirect = 18,
  kAcceptDirect = 19,
  kGpuArena = 20,
  kFetchGpu = 21,
  kAcceptGpu = 22,
  kGpuClosed = 23,
  kGpuTrial = 24,
  kGpuTried = 25,
  kGpuCaches = 26,
};
constexpr MessageType kLastMessage = MessageType::kGpuCaches;

using Generation = std::array<std::byte, 16>;
using Bytes = std::vector<std::byte>;

constexpr uint32_t kMaxName = 1024;  // bytes of any name or id
constexpr uint32_t kMaxText = 8192;  // bytes of a reason
constexpr uint32_t kMaxLayers = 4096;
constexpr uint32_t kMaxPlanes = 16;
constexpr uint32_t kMaxSlots = 1u << 16;
constexpr uint32_t kMinChunk = 4096;
constexpr uint32_t kMaxScales = kMaxLayers * kMaxPlanes;
constexpr uint32_t kMaxBlocks = 1u << 16;  // of a fetch that may go direct
constexpr uint32_t kMaxKeys = 2u << 20;    // bytes of the keys of a cache
// In Hello::schemes: understands the messages of the direct path, and allows it on this link.
constexpr uint32_t kDirectBit = 1u << 31;
// The same of GPU memory that processes of one host share. Bit 30 is that of drafts, and not used.
constexpr uint32_t kGpuIpcBit = 1u << 29;
// Beside it: a producer has a cache on a GPU.
constexpr uint32_t kGpuCachesBit = 1u << 28;
constexpr uint32_t kMaxPci = 64;  // bytes of a PCI address
// What a GPU_ARENA has for one peer: the stamp, and from kGpuTrialBytes on as many trials.
constexpr uint32_t kGpuMailboxBytes = 1024, kGpuTrials = 15, kGpuTrialBytes = 64;

// Each message is encoded as its type byte and then its fields in the order written here, all
// integers little-endian. decode() takes the bytes behind the type byte and throws
// Error(kProtocol) on anything else than exactly one such message.

// Both sides, first of all.
struct Hello {
  uint16_t version = kProtocolVersion;
  uint64_t incarnation = 0;
  std::string name;
  uint32_t slot_bytes = 0;  // largest chunk that this side can stage
  // That it can encode and decode: bit i is scheme i; and kDirectBit, kGpuIpcBit, kGpuCachesBit.
  uint32_t schemes = 0;

  Bytes encode() const;
  static Hello decode(std::span<const std::byte> body);
};

// Strides and place of one plane of one layer, relative to the lowest address of the cache.
struct View {
  uint64_t offset = 0;
  int64_t block_stride = 0, head_stride = 0, token_stride = 0, content_stride = 0;
};

// Consumer -> producer, once per cache and link, before the first fetch into that cache.
struct Layout {
  struct Plane {
    std::string name;
    uint32_t content = 0;
  };
  uint32_t cache_id = 0;
  std::string model;
  uint8_t element = 0;
  uint32_t num_blocks = 0, block_size = 0, num_heads = 0, first_head = 0;
  std::vector<std::string> layers;
  std::vector<Plane> planes;
  std::vector<View> views;    // [layers][planes]
  std::vector<float> scales;  // [layers][planes]; empty: 1 everywhere

  Bytes encode() const;
  static Layout decode(std::span<const std::byte> body);
};

// Consumer -> producer.
struct Fetch {
  uint64_t fetch_id = 0;  // unique on this link
  std::string offer_id;
  Generation generation{};
  uint32_t cache_id = 0;
  std::vector<uint32_t> layers;  // indices into Layout::layers
  uint32_t head_begin = 0, head_end = 0;
  uint32_t token_begin = 0, token_end = 0;
  uint32_t slot_in_block = 0;  // of token_begin in the consumer's first block
  uint8_t codec = 0;           // 0: raw
  uint16_t panel_tokens = 0;   // at most; what follows matters to codecs but raw
  uint16_t group = 0;          // elements of a row that share a scale; 0: the producer chooses
  uint8_t scale_format = 0;
  uint32_t raw_until = 0;          // tokens before this one travel raw
  uint32_t raw_from = UINT32_MAX;  // and from this one on
  // What the consumer can do, in 1e6 bytes a second of its cache; for a codec that is left to the
  // producer. 0: not said.
  uint32_t unpack_rate = 0, decode_rate = 0;
  uint8_t with_digest = 1;
  uint32_t chunk_bytes = 0;     // most bytes of a chunk
  uint32_t consumers = 1;       // agents of the consumer's side that fetch this offer here
  std::vector<uint32_t> slots;  // first credits

  Bytes encode() const;
  static Fetch decode(std::span<const std::byte> body);
};

// How one wire plane is encoded.
struct PlaneEncoding {
  uint8_t scheme = 0;
  uint8_t scale_format = 0;
  uint16_t group = 0;  // 0: the whole row
};

// Producer -> consumer: the fetch is being answered, in this wire order.
struct Accept {
  uint64_t fetch_id = 0;
  std::array<uint8_t, 5> order{};
  uint8_t per_layer = 0;  // 1: no chunk spans two layers
  uint32_t num_chunks = 0;
  uint64_t wire_bytes = 0;
  uint32_t producer_block_size = 0;
  uint32_t producer_slot = 0;  // of token_begin in the producer's block
  uint8_t codec = 0;
  uint8_t element = 0;        // that the producer's cache holds
  uint16_t panel_tokens = 0;  // 0: chunks are plain memory, not coded; then encodings are empty
  std::vector<PlaneEncoding> encodings;  // [wire planes], of tokens in [raw_until, raw_from)
  uint32_t raw_until = 0, raw_from = UINT32_MAX;
  std::vector<float> scales;  // of the producer's cache, [wire layers][wire planes]; empty: 1
  std::string why;            // this codec, for people

  Bytes encode() const;
  static Accept decode(std::span<const std::byte> body);
};

// What follows is said only to a peer that has set kDirectBit, by one that has, too.

// Consumer -> producer, behind the LAYOUT of the cache: the keys by which it may be written into.
struct Memory {
  uint32_t cache_id = 0;
  Bytes keys;  // of the link: see Link::remote_memory()

  Bytes encode() const;
  static Memory decode(std::span<const std::byte> body);
};

// Consumer -> producer: a FETCH whose chunks may be written straight into these blocks.
struct FetchDirect {
  enum Path : uint8_t { kAuto = 1, kDirect = 2 };  // kDirect: also where packing is faster

  Fetch fetch;
  uint8_t path = kAuto;
  std::vector<uint32_t> blocks;  // the first holds token_begin, in slot_in_block

  Bytes encode() const;
  static FetchDirect decode(std::span<const std::byte> body);
};

// Producer -> consumer: the ACCEPT of such a one.
struct AcceptDirect {
  Accept accept;
  uint8_t direct = 0;    // 1: chunks go into the blocks; else into slots as ever
  std::string path_why;  // for people

  Bytes encode() const;
  static AcceptDirect decode(std::span<const std::byte> body);
};

// What follows is said only to a peer that has set kGpuIpcBit, by one that has, too.

// Consumer -> producer: memory of a GPU with a slot for each of the staging arena's.
struct GpuArena {
  uint32_t arena = 0;  // unique on this link, not 0
  uint8_t vendor = 0;  // 0: NVIDIA, 1: AMD
  std::array<std::byte, 16> uuid{};
  std::string pci;                     // with the UUID it names the device
  uint64_t bytes = 0;                  // slots, each on a multiple of 256, and what is behind them
  uint64_t mailbox = 0;                // behind the slots: kGpuMailboxBytes of this peer's
  std::array<std::byte, 32> stamp{};   // random, at the mailbox: whoever opens it compares
  std::array<std::byte, 64> handle{};  // the runtime's own

  Bytes encode() const;
  static GpuArena decode(std::span<const std::byte> body);
};

// Consumer -> producer: a FETCH whose chunks may go into the slots of such an arena, in place of
// those of the same numbers in the staging arena.
struct FetchGpu {
  Fetch fetch;
  uint32_t arena = 0;

  Bytes encode() const;
  static FetchGpu decode(std::span<const std::byte> body);
};

// Producer -> consumer: the ACCEPT of such a one.
struct AcceptGpu {
  Accept accept;
  uint8_t gpu = 0;       // 1: chunks go there; else into the staging arena as ever
  std::string path_why;  // for people

  Bytes encode() const;
  static AcceptGpu decode(std::span<const std::byte> body);
};

// Producer -> consumer, as its last word on any link where it has set the bit: it has closed all of
// the consumer's GPU memory, and no GPU of it writes there any more. Without this only the end of
// its process says so.
Bytes encode_gpu_closed();
void decode_gpu_closed(std::span<const std::byte> body);

// Producer -> consumer: a GPU of it has opened an arena, and has written gpu_trial() of the stamp
// there, as it would chunks. Each trial once, before anything else is written.
struct GpuTrial {
  uint32_t arena = 0;
  uint32_t trial = 0;  // at (1 + trial) * kGpuTrialBytes of the mailbox; less than kGpuTrials

  Bytes encode() const;
  static GpuTrial decode(std::span<const std::byte> body);
};

// Consumer -> producer: what has come of it.
struct GpuTried {
  uint32_t arena = 0;
  uint32_t trial = 0;
  std::string problem;  // "": it is there

  Bytes encode() const;
  static GpuTried decode(std::span<const std::byte> body);
};

// Producer -> consumer, after a HELLO without kGpuCachesBit: now it has a cache on a GPU.
Bytes encode_gpu_caches();
void decode_gpu_caches(std::span<const std::byte> body);

// Producer -> consumer: chunk `chunk` is complete in slot `slot`. `bytes` is its true size, which
// for a coded one only the producer knows before. Travels as a message where the arena is mapped,
// else as the notice of the write.
struct Commit {
  uint64_t fetch_id = 0;
  uint32_t chunk = 0;
  uint32_t slot = 0;  // of a chunk that went into the blocks: the credit that it has used
  uint32_t bytes = 0;
  Digest digest;

  Bytes encode() const;
  static Commit decode(std::span<const std::byte> body);
};

// Producer -> consumer: the fetch ends here, and nothing is written for it any more.
struct Refused {
  uint64_t fetch_id = 0;
  StatusCode code = StatusCode::kInvalid;
  std::string reason;
  uint32_t retry_ms = 0;  // after which the same may work; 0: not said

  Bytes encode() const;
  static Refused decode(std::span<const std::byte> body);
};

// Consumer -> producer: more slots for this fetch.
struct Credit {
  uint64_t fetch_id = 0;
  std::vector<uint32_t> slots;

  Bytes encode() const;
  static Credit decode(std::span<const std::byte> body);
};

// Producer -> consumer, where layers are sent as they become ready: so many more chunks can be sent
// now. Slots are granted for them only then, so that a fetch which waits for a prefill holds none.
struct Want {
  uint64_t fetch_id = 0;
  uint32_t chunks = 0;

  Bytes encode() const;
  static Want decode(std::span<const std::byte> body);
};

// Consumer -> producer: it will not fetch this offer, which counts as if it had. Kept until the
// offer is made, answered then with DECLINED.
struct Decline {
  uint64_t fetch_id = 0;  // unique on this link, among fetches too
  std::string offer_id;
  Generation generation{};
  uint32_t cache_id = 0;   // the consumer's, that it would have fetched into
  uint32_t consumers = 1;  // as in Fetch
  uint8_t given_up = 0;    // 1: it began to fetch, and ends with this

  Bytes encode() const;
  static Decline decode(std::span<const std::byte> body);
};

// DONE (consumer: everything arrived and was verified), CANCEL (consumer: stop), CANCELLED
// (producer: stopped, nothing is written for it any more) and DECLINED (producer: noted) carry the
// fetch id alone.
Bytes encode_fetch_id(MessageType type, uint64_t fetch_id);
uint64_t decode_fetch_id(std::span<const std::byte> body);

// Consumer -> producer: extend the lease of an offer that no fetch is running on yet.
struct Renew {
  std::string offer_id;
  Generation generation{};

  Bytes encode() const;
  static Renew decode(std::span<const std::byte> body);
};

// Both ways. PING also renews the leases of all offers that its sender is fetching.
Bytes encode_ping();
void decode_ping(std::span<const std::byte> body);

// Both ways: the agent is closing in good order.
Bytes encode_bye(const std::string& reason);
std::string decode_bye(std::span<const std::byte> body);

// Type of a message; throws Error(kProtocol) on an empty or unknown one.
MessageType type_of(std::span<const std::byte> message);

}  // namespace kvxfer::wire

#endif  // KVXFER_WIRE_MESSAGES_H_
