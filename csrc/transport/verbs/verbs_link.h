#ifndef KVXFER_TRANSPORT_VERBS_VERBS_LINK_H_
#define KVXFER_TRANSPORT_VERBS_VERBS_LINK_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/common/link_base.h"
#include "transport/verbs/control.h"
#include "transport/verbs/fabric.h"
#include "transport/verbs/notice.h"
#include "transport/verbs/send_queue.h"

namespace kvxfer {

// The side with the arena is the reader, the other one the writer. A link has several paths, each a
// queue pair on one rail; control messages have a TCP socket.
//
// A path that fails is closed on both sides. Then the reader says how many stripes have arrived on
// it, those are done, and the rest goes over other paths. Because the reader's queue pair is
// destroyed first, nothing that was sent on the old path can land afterwards, when the slot may
// have been granted anew.
class VerbsLink final : public LinkBase, public ibv::Listener {
 public:
  // Connects the queue pairs. Throws Error(kNoResources).
  VerbsLink(IoThreads& threads, UniqueFd socket, VerbsEndpoint::State endpoint,
            ibv::EndpointAddress remote, const std::vector<ibv::PathChoice>& choices);
  ~VerbsLink() override;

  const char* transport() const override { return "verbs"; }
  std::string describe() const override;
  bool one_sided() const override { return reader_; }
  std::optional<double> rate() const override;

  void send(std::span<const std::byte> message) override;
  void write(std::span<const std::byte> source, uint64_t offset, std::span<const std::byte> notice,
             uint64_t token) override;

  bool direct() const override { return true; }
  std::string adapters() const override;
  std::shared_ptr<DirectMemory> register_memory(std::span<const DirectSpan> memory,
                                                DirectUse use) override;
  std::shared_ptr<RemoteMemory> remote_memory(std::span<const std::byte> keys) override;
  void write_direct(std::vector<DirectPiece> pieces, std::shared_ptr<DirectMemory> from,
                    std::shared_ptr<RemoteMemory> to, std::span<const std::byte> notice,
                    uint64_t token) override;

  void on_port_down(size_t nic, uint8_t port) override;
  void on_queue_pair_error(size_t nic, uint32_t number) override;
  void on_completion_queue_error(size_t nic, const ibv::Cq* cq) override;
  void on_adapter_error(size_t nic) override;

 protected:
  void begin() override;
  void shut() override;

 private:
  using Writes = std::vector<std::shared_ptr<ibv::Write>>;
  using Lock = std::lock_guard<std::mutex>;

  static constexpr uint64_t kMarker = ~uint64_t{0};  // id of the last send of a queue pair

  struct Path {
    size_t index = 0;
    std::shared_ptr<EventLoop> loop;
    size_t rail = 0;         // ours
    size_t remote_rail = 0;  // the peer's
    uint64_t speed = 1;      // beside the link's other paths
    ibv::PortGid gid, remote_gid;

    // What follows is guarded by mutex_. Only the path's loop takes `qp` away once it is watched.
    enum State : uint8_t {
      kOpen,
      kDraining,  // failed; its queue pair is being emptied
      kAwaiting,  // writer: closed here, the peer has not said yet what has arrived
      kClosed,
      kOpening,  // writer: has a new queue pair, the peer not yet
    };
    State state = kOpen;
    uint32_t epoch = 0;  // counts its queue pairs
    std::unique_ptr<ibv::QueuePair> qp;
    std::optional<ibv::SendQueue> sends;  // writer
    uint64_t landed = 0;                  // reader: stripes, in this epoch
    uint32_t receives_posted = 0;
    bool watched = false;
    bool drain_begun = false;
    bool drain_ends = false;
    bool marker_seen = false;
    bool asked_to_close = false;  // reader: the writer waits for `landed`
    bool retry_planned = false;
    uint32_t retries = 0;   // in a row, without room in the adapter's queue
    uint32_t attempts = 0;  // in a row, to open it again
    bool left = false;      // calls the sink no more
    std::string problem;
  };

  // setup.cc
  void connect(Path& path, const ibv::QpAddress& remote_qp);
  void adopt(Path& path, std::unique_ptr<ibv::QueuePair> qp);

  // verbs_link.cc
  void watch(Path& path, bool keep_alive);
  void on_control(uint32_t events);
  ibv::ControlSocket::Failure receive_control();
  void on_ready(Path& path);
  void poll(Path& path);
  bool poll_some(Path& path);
  ibv::QueuePair* watched_queue_pair(const Path& path) const;
  std::string handle_send(Path& path, const ibv::Wc& completion, Writes& done);
  std::string handle_receive(Path& path, const ibv::Wc& completion,
                             std::vector<std::vector<std::byte>>& landed);
  void weigh_paths();
  Path* choose_path(uint64_t bytes, const std::vector<size_t>& rails_taken);
  void put(std::shared_ptr<ibv::Write> write, std::span<const DirectPiece> pieces, uint64_t size,
           const std::string& problem);
  std::vector<Path*> cut(const std::shared_ptr<ibv::Write>& write,
                         std::span<const DirectPiece> pieces, uint64_t size);
  std::string pump(Path& path);
  void pump_later(Path& path);
  void report(const Writes& done);

  // failover.cc
  void lose_paths(size_t nic, const std::string& problem,
                  const std::function<bool(const ibv::QueuePair&)>& affected);
  bool drained(const Path& path) const;
  void count_failover(const Path& path);
  void lose_path(Path& path, const std::string& problem);
  void fail_after_last_words(const std::string& reason);
  void begin_drain(Path& path, uint32_t epoch);
  void finish_drain(Path& path, uint32_t epoch);
  void end_path(Path& path);
  void abandon(Path& path, Writes& done);
  void on_path_message(const ibv::PathMessage& message);
  void on_close(Path& path, const ibv::PathMessage& message);
  void on_answer(Path& path, const ibv::PathMessage& message);
  void on_open(Path& path, const ibv::PathMessage& message);
  void on_opened(Path& path, const ibv::PathMessage& message);
  void plan_reopening(Path& path);
  void reopen(Path& path);
  void tell(ibv::PathMessage::Kind kind, const Path& path);
  std::string path_text(const Path& path) const;
  size_t open_paths() const;

  const std::shared_ptr<VerbsFabric::State> fabric_;
  const std::shared_ptr<VerbsMemory> arena_;
  const std::shared_ptr<VerbsMemory> source_;  // so that it stays registered
  const ibv::EndpointAddress remote_;
  const std::shared_ptr<const ibv::Target> remote_arena_;
  const bool reader_;
  const std::string control_description_;
  ibv::ControlSocket socket_;
  ibv::Inbox inbox_;

  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Path>> paths_;  // the vector itself is immutable
  uint64_t next_write_ = 0;                   // guarded by mutex_
  size_t next_path_ = 0;                      // guarded by mutex_
  ibv::Counts counts_;                        // guarded by mutex_
  std::string last_failover_;                 // guarded by mutex_
};

}  // namespace kvxfer

#endif  // KVXFER_TRANSPORT_VERBS_VERBS_LINK_H_
