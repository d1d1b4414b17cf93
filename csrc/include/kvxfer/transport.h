#ifndef KVXFER_TRANSPORT_H_
#define KVXFER_TRANSPORT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace kvxfer {

class EventLoop;
class Link;

constexpr size_t kMaxMessage = 4u << 20;  // a layout of 1000 layers is about 100 KiB
constexpr size_t kMaxNotice = 64u << 10;
constexpr uint64_t kMaxWrite = 1u << 30;  // chunks are far smaller; more is a peer out of step

// What a link tells its owner. Calls come from the transport's threads, and from inside
// Link::write() where said; never while a lock of the transport is held. They must not throw.
class LinkSink {
 public:
  virtual ~LinkSink() = default;

  // A control message, in the order sent. Always called from one thread at a time per link.
  virtual void on_message(Link& link, std::span<const std::byte> message) = 0;

  // The peer wants to write `size` bytes at `offset` of our arena. Returns where they go, or null
  // to have them read and thrown away (the grant is gone: this is the fence for late writes). Not
  // called by transports whose peers write without us (shm, RDMA): there the grant is the fence.
  // Memory that was returned is written to until on_landed() or on_closed().
  virtual std::byte* on_incoming(Link& link, uint64_t offset, uint64_t size,
                                 std::span<const std::byte> notice) = 0;

  // All bytes of a write are in our arena. `notice` is what the writer attached. `accepted` repeats
  // whether on_incoming answered memory (true where that is not called). May be called from several
  // threads at once, each for another write; the callee may do the unpacking right there.
  virtual void on_landed(Link& link, std::span<const std::byte> notice, bool accepted) = 0;

  // The source of write(token) may be reused. `ok` false: the link is failing.
  virtual void on_written(Link& link, uint64_t token, bool ok) = 0;

  // The peer says nothing any more, but its end may be long in coming, as it may yet write into our
  // memory: see Link::expose_gpus(). On the control thread, at most once.
  virtual void on_lost([[maybe_unused]] Link& link, [[maybe_unused]] const std::string& reason) {}

  // Exactly once, also after close(), on the control thread: the last call of all, but for what a
  // later write() gets back from inside. The peer can write into our memory no more.
  virtual void on_closed(Link& link, const std::string& reason) = 0;
};

// A piece of memory that is to be registered. `on_gpu`: the host can't read or write there. Then
// `dmabuf` is a descriptor in which it begins at `offset`, the caller's, not used after the call;
// negative, adapters have to reach it by its address, which takes a peer-memory module.
struct DirectSpan {
  std::span<std::byte> memory;
  bool on_gpu = false;
  int dmabuf = -1;
  uint64_t offset = 0;
};

// Memory of ours that a link reads from or lets its peer write into, while this lives. It must not
// be unmapped before. Thread-safe.
class DirectMemory {
 public:
  virtual ~DirectMemory() = default;
  // What the peer must know to write into it: for authenticated peers only.
  virtual std::vector<std::byte> keys() const = 0;

  // That it is registered with. Each can be told to write into it or to read from it, over a
  // connection to itself, in which no peer takes part. Both wait, up to `seconds`, for the adapter,
  // and throw Error(kNoResources). At most kProbeBytes.
  static constexpr size_t kProbeBytes = 256;
  virtual size_t adapters() const { return 0; }
  virtual std::string adapter_name([[maybe_unused]] size_t adapter) const { return {}; }
  virtual void put([[maybe_unused]] size_t adapter, [[maybe_unused]] std::byte* to,
                   [[maybe_unused]] std::span<const std::byte> bytes,
                   [[maybe_unused]] double seconds) const {}
  virtual void get([[maybe_unused]] size_t adapter, [[maybe_unused]] const std::byte* from,
                   [[maybe_unused]] std::span<std::byte> bytes,
                   [[maybe_unused]] double seconds) const {}
};

// Memory of the peer, as its keys describe it. Immutable.
class RemoteMemory {
 public:
  virtual ~RemoteMemory() = default;
};

// `bytes` of ours that go to `offset`, counted from the lowest address of the peer's memory.
struct DirectPiece {
  const std::byte* source = nullptr;
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

// One peer reached over one transport. Thread-safe. All calls return without waiting for the peer.
// Neither start(), send() nor close() calls the sink from inside, so they may be called with a lock
// held that the sink takes; write() may.
//
// Held by shared_ptr only, which may be dropped anywhere, also inside a call to the sink. Between
// close(), or a peer's end, and on_closed() a link keeps itself alive. Dropping the last reference
// to a started link without close() ends it and calls nobody.
//
// To add a transport: implement this, hand finished links to Agent::attach(), and run the suite in
// tests/conformance over it. docs/adding_a_transport.md walks through it.
class Link {
 public:
  virtual ~Link() = default;

  virtual const char* transport() const = 0;

  // Begins to deliver to `sink`, which outlives the link's on_closed().
  virtual void start(LinkSink& sink) = 0;

  // Queues one control message of up to kMaxMessage bytes. Dropped silently once the link is
  // closing: on_closed() says so.
  virtual void send(std::span<const std::byte> message) = 0;

  // True when the peer's writes land in our arena without on_incoming() being asked (shared memory,
  // RDMA): then a granted slot is safe again only once the peer says so or on_closed() has come.
  virtual bool one_sided() const { return false; }

  // The peer's arena, when it is mapped here, else empty. When it is mapped, pack writes into it
  // and the commit travels by send(); write() is then not used.
  virtual std::span<std::byte> mapped_arena() const { return {}; }

  // Copies `source` to `offset` of the peer's arena; then the peer gets `notice` through
  // on_landed(). `source` stays untouched until on_written(token), which may be called from inside.
  // Up to kMaxWrite and kMaxNotice bytes. On a link that is closing or whose peer's arena is mapped
  // here, on_written(token, false) is called from inside, even when on_closed() has come already.
  virtual void write(std::span<const std::byte> source, uint64_t offset,
                     std::span<const std::byte> notice, uint64_t token) = 0;

  // The direct path, of transports that have one: from any memory of ours into any of the peer's
  // that it has registered and told us the keys of.
  virtual bool direct() const { return false; }
  // The adapters that it registers memory with, for people, and to compare links by.
  virtual std::string adapters() const { return {}; }
  // Registers pieces of memory, in order of their addresses, for this peer to write into or for us
  // to send from. Takes long: not to be called with a lock held. Throws Error(kNoResources). Null
  // where there is no direct path.
  enum class DirectUse : uint8_t { kSource, kTarget };
  virtual std::shared_ptr<DirectMemory> register_memory(
      [[maybe_unused]] std::span<const DirectSpan> memory, [[maybe_unused]] DirectUse use) {
    return nullptr;
  }
  // From what the peer has said, which may be anything. Throws Error(kProtocol).
  virtual std::shared_ptr<RemoteMemory> remote_memory(
      [[maybe_unused]] std::span<const std::byte> keys) {
    return nullptr;
  }
  // As write(), piece by piece; both memories are of this link. A piece that is not
  // registered on either side ends the link. Called only where direct() is true.
  virtual void write_direct([[maybe_unused]] std::vector<DirectPiece> pieces,
                            [[maybe_unused]] std::shared_ptr<DirectMemory> from,
                            [[maybe_unused]] std::shared_ptr<RemoteMemory> to,
                            [[maybe_unused]] std::span<const std::byte> notice,
                            [[maybe_unused]] uint64_t token) {}

  // Memory of GPUs that processes of one host share: why that can't be over this link, or "".
  virtual std::string gpu_ipc_problem() const {
    return std::string(transport()) + " shares no memory of GPUs";
  }
  // From now on the peer may open memory of our GPUs, and on_closed() comes only when it has said
  // that it let go of all, or its process has ended: what its GPU still had to do has ended then.
  // Called only where there is no such problem, before the peer is told of any such memory.
  virtual void expose_gpus() {}
  // The other side of that, as the last call of all: nothing of the peer's is open any more. Also
  // where nothing was.
  virtual void let_go_of_gpus() {}

  // Ends the link. on_closed() follows from another thread, when the fence is complete: on a mapped
  // arena only when the peer has let go of it.
  virtual void close(const std::string& reason) = 0;

  // Human-readable facts for reports: addresses, streams, rails.
  virtual std::string describe() const = 0;

  // False where bytes go no further than this host's memory: then encoding them can't pay.
  virtual bool crosses_wire() const { return true; }

  // How many bytes a second the link itself carries towards the peer, as far as it is known:
  // measured where enough was sent, else what its interface says. None where nothing is known, or
  // where there is no link: memory is shared. Never waits; locks none of the sink's owner's locks.
  virtual std::optional<double> rate() const { return std::nullopt; }
};

// The threads that all links of one agent share: "kvx-ctl" for control messages and timers, and
// "kvx-io-<i>" for the streams that carry bulk data, made when first used. They sleep when idle.
//
// Outlives the links' on_closed(); links themselves may be dropped later. Thread-safe.
class IoThreads {
 public:
  // `bulk`: how many data threads there may be, at least 1. Throws Error(kNoResources).
  explicit IoThreads(size_t bulk);

  // As stop().
  ~IoThreads();

  // Stops and joins the threads; nothing is called back any more. Idempotent. Links that are made
  // afterwards never deliver anything.
  void stop();

  IoThreads(const IoThreads&) = delete;
  IoThreads& operator=(const IoThreads&) = delete;

  const std::shared_ptr<EventLoop>& control() const;
  std::shared_ptr<EventLoop> bulk(size_t index);  // index is taken modulo the number of threads

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Links over descriptors that are connected already. They own the descriptors from the call on,
// also when it throws Error(kInvalid) or Error(kNoResources).

// One host. `control_fd` is a connected AF_UNIX stream socket. `arena_fd` is the memfd of the
// peer's arena, of `arena_bytes` bytes, sealed against shrinking; -1 on the side whose peer has
// none.
std::shared_ptr<Link> make_shm_link(IoThreads& threads, int control_fd, int arena_fd,
                                    uint64_t arena_bytes);

// Between hosts. One socket for control and at least one for data, all to the same peer.
std::shared_ptr<Link> make_tcp_link(IoThreads& threads, int control_fd, std::vector<int> data_fds);

// What goes wrong on a loopback link. Probabilities are 0 to 1 and apply to each message or write.
struct LoopbackFaults {
  double drop_message = 0;
  double duplicate_message = 0;
  double drop_write = 0;          // never lands; the writer is told that it was written
  double duplicate_write = 0;     // lands twice, the second time perhaps after others
  double reorder_write = 0;       // held back until the next one has landed
  double corrupt_write = 0;       // one bit of the bytes that landed is flipped
  uint32_t delay_us = 0;          // up to this long between write() and on_incoming()
  uint64_t bytes_per_second = 0;  // that writes are paced to, and Link::rate(); 0: no limit
  uint64_t seed = 1;
};

// Both ends of a link within one process, for tests: what is written is copied, so a write is late
// when the reader has given up on it. `a` and `b` may be the same.
std::pair<std::shared_ptr<Link>, std::shared_ptr<Link>> make_loopback_pair(
    IoThreads& a, IoThreads& b, const LoopbackFaults& faults = {});

}  // namespace kvxfer

#endif  // KVXFER_TRANSPORT_H_
