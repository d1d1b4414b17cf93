#ifndef KVXFER_TRANSPORT_TCP_DATA_STREAM_H_
#define KVXFER_TRANSPORT_TCP_DATA_STREAM_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/event_loop.h"
#include "base/unique_fd.h"

namespace kvxfer {

// One TCP connection that carries writes, one after the other: a header (magic, length of the
// notice, size, offset; little-endian), the notice, the bytes. Failures are returned as text for
// people; after the first one the stream is of no more use.
class DataStream {
 public:
  using Failure = std::optional<std::string>;

  struct Written {
    uint64_t token;
    bool ok;
  };

  // Who takes what arrives. Called on the loop's thread.
  class Receiver {
   public:
    virtual ~Receiver() = default;
    // Where the bytes go; null: nowhere.
    virtual std::byte* incoming(uint64_t offset, uint64_t size,
                                std::span<const std::byte> notice) = 0;
    // All bytes are there. Returns false to receive no more.
    virtual bool landed(std::span<const std::byte> notice, bool accepted) = 0;
  };

  DataStream(std::shared_ptr<EventLoop> loop, UniqueFd fd);
  ~DataStream();  // takes the descriptor off the loop and closes it

  DataStream(const DataStream&) = delete;
  DataStream& operator=(const DataStream&) = delete;

  int fd() const { return fd_.get(); }
  EventLoop& loop() const { return *loop_; }

  // Has `handler` called on the loop when there is something to receive() or flush().
  void watch(EventLoop::Handler handler);
  // On the loop's thread only.
  void unwatch() { loop_->remove(fd_.get()); }

  // Sends at once what the socket takes, from the calling thread, while the bytes are in its cache;
  // flush() sends the rest. Writes whose source is free again are appended to `done`. Thread-safe.
  Failure write(std::span<const std::byte> source, uint64_t offset,
                std::span<const std::byte> notice, uint64_t token, std::vector<Written>& done);
  Failure flush(std::vector<Written>& done);

  // Appends all writes that wait, and has later ones fail. Thread-safe.
  void abandon(std::vector<Written>& done);

  // Bytes that wait to be sent, roughly. Thread-safe.
  uint64_t queued() const { return queued_.load(std::memory_order_relaxed); }

  // Receives what is there, within reason. On the loop's thread only.
  Failure receive(Receiver& receiver);

  void shutdown();

 private:
  struct Outgoing {
    std::vector<std::byte> head;  // header and notice
    std::span<const std::byte> source;
    uint64_t token = 0;
    size_t sent = 0;
  };
  static constexpr size_t kHeader = 24;

  Failure send_some(std::span<const std::byte> head, std::span<const std::byte> source,
                    size_t& sent);
  Failure parse_header();
  Failure advance(Receiver& receiver, bool& go_on);  // the current part is complete

  const std::shared_ptr<EventLoop> loop_;
  const UniqueFd fd_;

  std::mutex mutex_;
  std::deque<Outgoing> queue_;  // guarded by mutex_
  bool want_out_ = false;       // guarded by mutex_; EPOLLOUT is asked for
  bool abandoned_ = false;      // guarded by mutex_
  std::atomic<uint64_t> queued_{0};

  // The write that is arriving.
  enum class Part : uint8_t { kHeader, kNotice, kBytes };
  Part part_ = Part::kHeader;
  size_t received_ = 0;  // of the part
  std::array<std::byte, kHeader> header_;
  std::vector<std::byte> notice_;
  uint64_t size_ = 0;
  uint64_t offset_ = 0;
  std::byte* destination_ = nullptr;
};

}  // namespace kvxfer

#endif  // KVXFER_TRANSPORT_TCP_DATA_STREAM_H_
