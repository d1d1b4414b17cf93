#ifndef KVXFER_TRANSPORT_UCX_UCX_LINK_H_
#define KVXFER_TRANSPORT_UCX_UCX_LINK_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/common/frame_socket.h"
#include "transport/common/link_base.h"
#include "transport/ucx/worker.h"

namespace kvxfer {

struct UcxEndpoint::State {
  std::shared_ptr<UcxFabric::State> fabric;
  std::shared_ptr<UcxMemory> arena;     // null: the producer's side
  std::shared_ptr<ucp::Driver> driver;  // null once connected
  std::vector<std::byte> address;
  ucp::Lanes lanes;
  ucp::Key key{};  // of messages
};

// The side with the arena is the reader, the other one the writer. Control messages have a socket
// of their own, for UCX neither authenticates nor keeps them apart from what is large.
class UcxLink final : public LinkBase {
 public:
  // `arena_bytes`: of the peer's, at the writer. `rate`: bytes a second, 0: unknown.
  UcxLink(IoThreads& threads, UniqueFd socket, UcxEndpoint::State endpoint, uint64_t arena_bytes,
          double rate);

  const char* transport() const override { return "ucx"; }
  std::string describe() const override { return description_; }
  bool one_sided() const override { return reader_ && puts_; }
  std::optional<double> rate() const override {
    return rate_ > 0 ? std::optional(rate_) : std::nullopt;
  }

  void send(std::span<const std::byte> message) override;
  void write(std::span<const std::byte> source, uint64_t offset, std::span<const std::byte> notice,
             uint64_t token) override;

 protected:
  void begin() override;
  void shut() override;

 private:
  void on_control(uint32_t events);
  FrameSocket::Failure receive_control();
  void collect();
  bool deliver(std::span<const std::byte> message);
  void lose(const std::string& reason);
  void end_driver();
  void finish();

  const std::shared_ptr<UcxFabric::State> fabric_;
  const std::shared_ptr<UcxMemory> arena_;
  const std::shared_ptr<ucp::Driver> driver_;
  const bool reader_;
  const bool puts_;
  const ucp::Key key_;
  const uint64_t arena_bytes_;
  const double rate_;
  const std::string description_;
  FrameSocket socket_;

  // The driver's loop's.
  bool ending_ = false;
  bool finished_ = false;
};

}  // namespace kvxfer

#endif  // KVXFER_TRANSPORT_UCX_UCX_LINK_H_
