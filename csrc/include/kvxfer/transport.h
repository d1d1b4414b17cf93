#ifndef KVXFER_TRANSPORT_H_
#define KVXFER_TRANSPORT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace kvxfer {

class Link;

// What a link tells its owner. Calls come from the transport's threads, or from the thread inside
// Link::write() / Link::send() only where said; never while a lock of the transport is held.
class LinkSink {
 public:
  virtual ~LinkSink() = default;

  // A control message, in the order sent. Always called from one thread at a time per link.
  virtual void on_message(Link& link, std::span<const std::byte> message) = 0;

  // The peer wants to write `size` bytes at `offset` of our arena. Returns where they go, or null to
  // have them read and thrown away (the grant is gone: this is the fence for late writes).
  // Not called by transports whose peers write without us (shm, RDMA): there the grant is the fence.
  virtual std::byte* on_incoming(Link& link, uint64_t offset, uint64_t size, std::span<const std::byte> notice) = 0;

  // All bytes of a write are in our arena. `notice` is what the writer attached. `accepted` repeats
  // what on_incoming answered (true where that is not called). May be called from several threads
  // at once, each for another write; the callee may do the unpacking right there.
  virtual void on_landed(Link& link, std::span<const std::byte> notice, bool accepted) = 0;

  // The source of write(token) may be reused. `ok` false: the link is failing.
  virtual void on_written(Link& link, uint64_t token, bool ok) = 0;

  // Last call of all. The peer can write into our memory no more. Exactly once, also after close().
  virtual void on_closed(Link& link, const std::string& reason) = 0;
};

// One peer reached over one transport. Thread-safe. All calls return without waiting for the peer.
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

  // The peer's arena, when it is mapped here, else empty. When it is mapped, pack writes into it and
  // the commit travels by send(); write() is then not used.
  virtual std::span<std::byte> mapped_arena() const { return {}; }

  // Copies `source` to `offset` of the peer's arena; then the peer gets `notice` through
  // on_landed(). `source` stays untouched until on_written(token), which may be called from inside.
  virtual void write(std::span<const std::byte> source, uint64_t offset, std::span<const std::byte> notice,
                     uint64_t token) = 0;

  // Ends the link. on_closed() follows from another thread, when the fence is complete: on a mapped
  // arena only when the peer has let go of it.
  virtual void close(const std::string& reason) = 0;

  // Human-readable facts for reports: addresses, streams, rails.
  virtual std::string describe() const = 0;
};

constexpr size_t kMaxMessage = 4u << 20;  // a layout of 1000 layers is about 100 KiB

}  // namespace kvxfer

#endif  // KVXFER_TRANSPORT_H_
