#ifndef KVXFER_TRANSPORT_UCX_WORKER_H_
#define KVXFER_TRANSPORT_UCX_WORKER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/event_loop.h"
#include "transport/ucx/fabric.h"

namespace kvxfer::ucp {

using Key = std::array<std::byte, 16>;

// What a reader tells the writer.
struct ReaderAddress {
  Key key{};  // random; each message begins with it
  uint64_t arena_base = 0;
  uint64_t arena_bytes = 0;
  std::string rkey;  // empty: nothing can be put
  std::string worker;

  std::vector<std::byte> encode() const;
  // Throws Error(kProtocol). UCX takes no length for what it parses: zeros follow `rkey` and
  // `worker`, on which its parsers stop.
  static ReaderAddress decode(std::span<const std::byte> bytes);
};

// What announces a write at the reader. The bytes follow in the same message, or were put before.
struct Message {
  uint64_t offset = 0;
  std::span<const std::byte> notice;
  std::span<const std::byte> bytes;
  bool put = false;

  static std::vector<std::byte> encode_head(const Key& key, uint64_t offset, uint64_t size,
                                            bool put, std::span<const std::byte> notice);
  static Message decode(std::span<const std::byte> message);  // throws Error(kProtocol)
};

// What UCX has chosen for an endpoint.
struct Lanes {
  std::vector<std::string> names;  // as "rc_verbs/mlx5_0:1"
  bool put = false;                // can_put() holds for all that carry data
};

struct Write {
  uint64_t token = 0;
  std::span<const std::byte> source;
  uint64_t offset = 0;
  std::vector<std::byte> head;        // Message::encode_head()
  std::shared_ptr<UcxMemory> memory;  // that holds `source`, or null

  // The driver's.
  class Driver* driver = nullptr;
  std::array<Iov, 2> parts;
  int pending = 0;        // requests under way
  bool reported = false;  // the source is free
  bool announced = false;
  Status status = kOk;
};

// A worker of UCP with at most one endpoint, for one link. It lives on one loop: once start() was
// called only that thread uses it, and it sleeps when there is nothing to do. UCX's callbacks only
// take notes; `on_progress` hears of them afterwards, when the link may do as it likes.
//
// Over RDMA lanes bytes are put, and announced by an active message when the flush behind the put
// says that they are there. Over others the message carries them along, and the reader copies them.
//
// Destroying the worker is the fence. Its sockets, queue pairs and receive buffers are its own, so
// once it is gone nobody writes into the arena through it, and it reads no source any more.
class Driver : public std::enable_shared_from_this<Driver> {
 public:
  // Throws Error(kNoResources).
  Driver(std::shared_ptr<UcxFabric::State> fabric, std::shared_ptr<EventLoop> loop);
  ~Driver();

  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  const std::shared_ptr<EventLoop>& loop() const { return loop_; }
  std::string address() const;  // before start()

  // `key`: of the messages that are taken. Without one none are.
  void start(const std::optional<Key>& key);

  // What follows is for the loop's thread.

  // Replaces what is called after each progress. Null: nothing.
  void set_on_progress(std::function<void()> on_progress) {
    on_progress_ = on_progress
                       ? std::make_shared<const std::function<void()>>(std::move(on_progress))
                       : nullptr;
  }
  // Creates the endpoint and begins to connect it; `on_progress` finds connected() or problem().
  void connect(const ReaderAddress& reader);
  void begin(const std::shared_ptr<Write>& write, bool put);
  // Makes progress until there is none, then sleeps until there is.
  void drive();
  // Begins to close the endpoint without waiting for what is under way, whose callbacks come.
  void close_endpoint();
  bool closed() const { return closed_; }  // the endpoint
  // Ends all. What was under way is found in take_written().
  void destroy();

  bool connected() const { return connected_; }
  Lanes lanes() const;              // once connected
  double bytes_per_second() const;  // as UCX estimates; 0: unknown
  // What went wrong, once; empty: nothing.
  std::string take_problem() { return std::exchange(problem_, {}); }
  // Tokens of writes whose source is free again, and whether they landed.
  std::vector<std::pair<uint64_t, bool>> take_written() { return std::exchange(written_, {}); }
  // Hands over each message that the peer sent, until `deliver` answers false.
  void take_messages(const std::function<bool(std::span<const std::byte>)>& deliver);

 private:
  static void on_complete(void* request, Status status, void* write);
  static void on_connected(void* request, Status status, void* self);
  static void on_endpoint_closed(void* request, Status status, void* self);
  static void on_error(void* self, Endpoint* endpoint, Status status);
  static Status on_message(void* self, const void* header, size_t header_size, void* data,
                           size_t size, const AmRecvParam* param);

  void note(const std::string& problem);
  void announce(Write& write);
  void track(Write& write, StatusPtr posted);
  void release(Write& write);
  void settle();
  void report(Write& write, bool ok);
  bool must_stay() const;

  const std::shared_ptr<UcxFabric::State> fabric_;
  const Library& library_;
  const std::shared_ptr<EventLoop> loop_;
  const uint64_t generation_;
  Worker* worker_ = nullptr;
  int event_fd_ = -1;

  std::optional<Key> key_;
  std::shared_ptr<const std::function<void()>> on_progress_;
  Endpoint* endpoint_ = nullptr;
  Rkey* rkey_ = nullptr;
  uint64_t arena_base_ = 0;
  bool connected_ = false;
  bool closed_ = false;
  std::string problem_;
  std::unordered_map<Write*, std::shared_ptr<Write>> writes_;
  std::vector<Write*> settled_;  // nothing of them is under way
  std::vector<std::pair<uint64_t, bool>> written_;
  std::deque<std::pair<void*, size_t>> messages_;
  size_t early_bytes_ = 0;  // of messages that came before anybody listened
};

}  // namespace kvxfer::ucp

#endif  // KVXFER_TRANSPORT_UCX_WORKER_H_
